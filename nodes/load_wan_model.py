"""The nodes that choose the files of a Wan model: its transformers, and LoRAs on them."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from ..lowmem_core.denoise import LoraUse
from ..lowmem_core.families.wan.models import WanFiles
from ._comfy_host import file_mark, model_names, model_path
from ._sockets import DTYPES, WAN_MODEL

_FOLDER = "diffusion_models"
_NONE = "none"
_TARGETS = {"first or high-noise": (0,), "low-noise": (1,), "both": (0, 1)}


class LowmemWanLoader(io.ComfyNode):
    """Point to the transformers of a Wan model without loading them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        names = model_names(_FOLDER, ".gguf")
        return io.Schema(
            node_id="LowmemWanLoader",
            display_name="Load Wan Model (LowMem)",
            category="LowMem",
            description="Points to the transformer of a Wan 2.1 or 2.2 model, or to both of Wan 2.2 A14B. "
            "Weights are loaded by the node that denoises; fp8 and GGUF files stay as small as they are.",
            inputs=[
                io.Combo.Input("model_name", options=names, tooltip="The transformer, or the high-noise one of two."),
                io.Combo.Input(
                    "low_noise_name",
                    options=[_NONE, *names],
                    default=_NONE,
                    tooltip="The low-noise transformer of Wan 2.2 A14B models.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="What to compute in. auto: as the file is stored, bf16 for fp8 and GGUF files.",
                ),
            ],
            outputs=[WAN_MODEL.Output("model", tooltip="Connect it to Wan Streaming Denoise.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, low_noise_name: str, dtype: str) -> list[tuple[int, int]]:
        """Notice that a file was replaced."""
        return [file_mark(_FOLDER, name) for name in (model_name, low_noise_name) if name != _NONE]

    @classmethod
    def execute(cls, model_name: str, low_noise_name: str, dtype: str) -> io.NodeOutput:
        """Return the handle."""
        low_noise = None if low_noise_name == _NONE else model_path(_FOLDER, low_noise_name)
        return io.NodeOutput(WanFiles(model_path(_FOLDER, model_name), low_noise, DTYPES[dtype]))


class LowmemWanLoRA(io.ComfyNode):
    """Put a LoRA on a Wan model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanLoRA",
            display_name="Wan LoRA (LowMem)",
            category="LowMem",
            description="Applies a LoRA while the model runs. Base weights are not touched, quantised ones neither.",
            inputs=[
                WAN_MODEL.Input("model", tooltip="From Load Wan Model (LowMem)."),
                io.Combo.Input("lora_name", options=model_names("loras"), tooltip="A LoRA in models/loras."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How strongly it is applied; 0 gives the model without it.",
                ),
                io.Combo.Input(
                    "target",
                    options=list(_TARGETS),
                    default="first or high-noise",
                    tooltip="Which transformer of a model that has two.",
                ),
            ],
            outputs=[WAN_MODEL.Output("model")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: object, lora_name: str, strength: float, target: str) -> tuple[int, int]:
        """Notice that the file was replaced."""
        return file_mark("loras", lora_name)

    @classmethod
    def execute(cls, model: WanFiles, lora_name: str, strength: float, target: str) -> io.NodeOutput:
        """Return the handle with the LoRA."""
        path = model_path("loras", lora_name)
        uses = tuple(LoraUse(path, strength, number) for number in _TARGETS[target])
        return io.NodeOutput(replace(model, loras=model.loras + uses))
