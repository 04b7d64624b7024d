"""What a Lance model is built like, read from its ``llm_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError

CONFIG_FILE = "llm_config.json"
LATENT_CHANNELS = 48
TIME_VALUES = 256
_FLOATS = ("rms_norm_eps", "rope_theta")
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "vision_start_token_id",
    "vision_end_token_id",
)


@dataclass(frozen=True)
class LanceConfig:
    """Sizes of a Lance model; ``tie_word_embeddings`` of the file does not hold and is not read.

    Attributes:
        width: Of hidden states.
        mlp_width: Inside the MLPs.
        layers: Of each tower.
        heads: Of queries.
        kv_heads: Of keys and values; each serves ``heads // kv_heads`` queries.
        vocabulary: Token ids.
        norm_eps: Of every norm.
        rope_theta: Base of the rotary angles.
        mrope_sections: How many angles go by time, by row and by column.
        vision_start: Token before the latents.
        vision_end: Token after them.
    """

    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    mrope_sections: tuple[int, int, int]
    vision_start: int
    vision_end: int

    @property
    def head_width(self) -> int:
        """Values of a head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Values of all key heads of a token."""
        return self.kv_heads * self.head_width

    @classmethod
    def read(cls, folder: Path) -> LanceConfig:
        """Read the file in a model folder.

        Raises:
            CheckpointError: It is missing, damaged, or of another kind of model.
        """
        path = folder / CONFIG_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there is no {CONFIG_FILE} in {folder}",
                need=f"the folder of a Lance model: {CONFIG_FILE}, model.safetensors and the tokenizer's files",
                remedy="Give the folder of the model, such as Lance_3B.",
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}", have=str(error), remedy="Download it again.") from error
        return cls.of(found if isinstance(found, dict) else {}, str(path))

    @classmethod
    def of(cls, found: Mapping[str, Any], source: str) -> LanceConfig:
        """Return the configuration in a JSON object.

        Raises:
            CheckpointError: A value is missing, or they do not go together.
        """
        counts = {name: found.get(name) for name in _COUNTS}
        floats = {name: found.get(name) for name in _FLOATS}
        rope = found.get("rope_scaling")
        sections = rope.get("mrope_section") if isinstance(rope, dict) else None
        bad = [name for name, value in counts.items() if type(value) is not int or value < (0 if "_id" in name else 1)]
        bad += [name for name, value in floats.items() if not isinstance(value, int | float) or value <= 0]
        if not _is_triple(sections):
            bad.append("rope_scaling.mrope_section")
        if bad:
            raise CheckpointError(
                f"{source} does not describe a Lance model",
                need="positive numbers, and three mrope sections",
                have=f"none for {', '.join(bad)}",
                remedy="Use the llm_config.json that came with the model.",
            )
        assert isinstance(sections, list)
        config = cls(
            width=counts["hidden_size"] or 0,
            mlp_width=counts["intermediate_size"] or 0,
            layers=counts["num_hidden_layers"] or 0,
            heads=counts["num_attention_heads"] or 0,
            kv_heads=counts["num_key_value_heads"] or 0,
            vocabulary=counts["vocab_size"] or 0,
            norm_eps=float(floats["rms_norm_eps"] or 0),
            rope_theta=float(floats["rope_theta"] or 0),
            mrope_sections=(sections[0], sections[1], sections[2]),
            vision_start=counts["vision_start_token_id"] or 0,
            vision_end=counts["vision_end_token_id"] or 0,
        )
        config._check(source)
        return config

    def _check(self, source: str) -> None:
        """Raise unless heads, sections and token ids fit the sizes."""
        whole = self.width % self.heads == 0 and self.heads % self.kv_heads == 0
        fits = whole and 2 * sum(self.mrope_sections) == self.head_width
        if not fits or max(self.vision_start, self.vision_end) >= self.vocabulary:
            raise CheckpointError(
                f"the sizes in {source} do not go together",
                need="heads that divide the width, sections that halve a head, and token ids within the vocabulary",
                have=f"width {self.width}, {self.heads} heads, {self.kv_heads} of keys, "
                f"sections {list(self.mrope_sections)}, vocabulary {self.vocabulary}",
            )


def _is_triple(value: object) -> bool:
    """Return whether ``value`` is a list of three whole numbers."""
    return isinstance(value, list) and len(value) == 3 and all(type(one) is int and one >= 0 for one in value)
