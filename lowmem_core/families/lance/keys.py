"""Names of a Lance checkpoint: which tower a tensor belongs to, what we call it, and the shape it must have.

Every layer holds two sets of weights. The one that understands has plain names, the one that draws has ``_moe_gen`` in
them. Making an image from text needs neither the head, nor the stored positions, nor the vision transformer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...errors import CheckpointError
from .config import CONFIG_FILE, LATENT_CHANNELS, TIME_VALUES, LanceConfig

EMBEDDINGS = "language_model.model.embed_tokens.weight"
_LAYER = "language_model.model.layers"
_HEAD = "language_model.lm_head.weight"
_POSITIONS = "latent_pos_embed.pos_embed"
_VISION = "vit_model."
_LISTED = 4

_PROJECTIONS = ("q", "k", "v")
_IN = {
    "input_layernorm{g}.weight": "norm",
    "self_attn.q_norm{g}.weight": "q_norm",
    "self_attn.k_norm{g}.weight": "k_norm",
    **{f"self_attn.{p}_proj{{g}}.{leaf}": f"{p}.{leaf}" for p in _PROJECTIONS for leaf in ("weight", "bias")},
}
_OUT = {
    "self_attn.o_proj{g}.weight": "o.weight",
    "post_attention_layernorm{g}.weight": "norm",
    "mlp{g}.gate_proj.weight": "gate.weight",
    "mlp{g}.up_proj.weight": "up.weight",
    "mlp{g}.down_proj.weight": "down.weight",
}
_IO = {
    "time_embedder.mlp.0.weight": "time_in.weight",
    "time_embedder.mlp.0.bias": "time_in.bias",
    "time_embedder.mlp.2.weight": "time_out.weight",
    "time_embedder.mlp.2.bias": "time_out.bias",
    "vae2llm.weight": "latent_in.weight",
    "vae2llm.bias": "latent_in.bias",
    "llm2vae.weight": "latent_out.weight",
    "llm2vae.bias": "latent_out.bias",
}


class LanceNames(NamedTuple):
    """``{name in the file: name in the module}`` of what an image needs.

    Attributes:
        und: The tower that understands. Its last layer only gives keys and values: what comes after is never used.
        gen: The tower that draws.
        io: What turns latents into hidden states and back.
    """

    und: dict[str, str]
    gen: dict[str, str]
    io: dict[str, str]


def names_of(config: LanceConfig) -> LanceNames:
    """Return the names of the tensors that an image needs."""
    und = _tower_names(config, "")
    unused = f"outs.{config.layers - 1}."
    gen = _tower_names(config, "_moe_gen") | {"language_model.model.norm_moe_gen.weight": "norm"}
    return LanceNames({name: ours for name, ours in und.items() if not ours.startswith(unused)}, gen, dict(_IO))


def check_names(shapes: Mapping[str, tuple[int, ...]], config: LanceConfig, source: str) -> None:
    """Raise unless a checkpoint is whole: all tensors of the model, used or not, each of its shape, and no others.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of another shape.
    """
    expected = _expected_shapes(config)
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected and not name.startswith(_VISION)]
    wrong = [
        f"{name} is {list(shapes[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and not _fits(name, shapes[name], shape)
    ]
    kinds = (("missing", missing), ("unexpected", extra), ("of another shape", wrong))
    problems = [f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds if names]
    if problems:
        raise CheckpointError(
            f"{source} is not the Lance model that its {CONFIG_FILE} describes",
            need=f"{len(expected)} tensors",
            have="; ".join(problems),
            remedy="Use model.safetensors and llm_config.json of one download, whole.",
        )


def _tower_names(config: LanceConfig, suffix: str) -> dict[str, str]:
    """Return the names of one tower's layers."""
    pieces = [("ins", _IN), ("outs", _OUT)]
    return {
        f"{_LAYER}.{layer}.{name.format(g=suffix)}": f"{part}.{layer}.{ours}"
        for layer in range(config.layers)
        for part, names in pieces
        for name, ours in names.items()
    }


def _expected_shapes(config: LanceConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a whole checkpoint; of the stored positions only the width counts."""
    width, mlp, kv, head = config.width, config.mlp_width, config.kv_width, config.head_width
    layer = {
        "norm": (width,),
        "q_norm": (head,),
        "k_norm": (head,),
        "q.weight": (width, width),
        "q.bias": (width,),
        "k.weight": (kv, width),
        "k.bias": (kv,),
        "v.weight": (kv, width),
        "v.bias": (kv,),
        "o.weight": (width, width),
        "gate.weight": (mlp, width),
        "up.weight": (mlp, width),
        "down.weight": (width, mlp),
    }
    towers = [_tower_names(config, suffix) for suffix in ("", "_moe_gen")]
    shapes = {name: layer[ours.split(".", 2)[2]] for names in towers for name, ours in names.items()}
    for name in (EMBEDDINGS, _HEAD):
        shapes[name] = (config.vocabulary, width)
    for name in ("norm", "norm_moe_gen"):
        shapes[f"language_model.model.{name}.weight"] = (width,)
    shapes |= {
        "time_embedder.mlp.0.weight": (width, TIME_VALUES),
        "time_embedder.mlp.0.bias": (width,),
        "time_embedder.mlp.2.weight": (width, width),
        "time_embedder.mlp.2.bias": (width,),
        "vae2llm.weight": (width, LATENT_CHANNELS),
        "vae2llm.bias": (width,),
        "llm2vae.weight": (LATENT_CHANNELS, width),
        "llm2vae.bias": (LATENT_CHANNELS,),
        _POSITIONS: (-1, width),
    }
    return shapes


def _fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a shape is right."""
    return found == wanted or (name == _POSITIONS and len(found) == 2 and found[1] == wanted[1])


def _few(names: Iterable[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    known = list(names)
    more = len(known) - _LISTED
    return ", ".join(known[:_LISTED]) + (f" and {more} more" if more > 0 else "")
