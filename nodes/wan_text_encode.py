"""The node that embeds prompts for Wan models, its encoder streamed."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..lowmem_core.memory import MemoryBudget
from ..lowmem_core.text import DEFAULT_LIMIT_BYTES, EmbedsCache, EncodeOptions, embed_prompts
from ._comfy_host import comfy_host, private_folder, text_encoder_mark, text_encoder_names, text_encoder_path
from ._sockets import BUDGET, DTYPES


class LowmemWanTextEncode(io.ComfyNode):
    """Embed a prompt and a negative prompt with UMT5."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanTextEncode",
            display_name="Wan Text Encode (LowMem)",
            category="LowMem",
            description="Embeds both prompts with the UMT5 encoder of Wan, block by block from the file, so that "
            "it takes little memory. Prompts that were embedded before are read from the disk.",
            inputs=[
                io.Combo.Input(
                    "text_encoder_name",
                    options=text_encoder_names(),
                    tooltip="UMT5 from models/text_encoders, or a pipeline's folder in models/diffusers.",
                ),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True, tooltip="What to show."),
                io.String.Input("negative_prompt", multiline=True, dynamic_prompts=True, tooltip="What not to show."),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="What to compute in. auto: bf16, as Wan was trained with.",
                ),
                io.Boolean.Input("cache", default=True, tooltip="Keep embedded prompts on disk, up to 1 GiB."),
                BUDGET.Input("budget", optional=True, tooltip="The most device memory; 2 GiB without."),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, text_encoder_name: str, **settings: Any) -> tuple[int, int]:
        """Notice that the file was replaced."""
        return text_encoder_mark(text_encoder_name)

    @classmethod
    def execute(
        cls,
        text_encoder_name: str,
        prompt: str,
        negative_prompt: str,
        dtype: str,
        cache: bool,
        budget: MemoryBudget | None = None,
    ) -> io.NodeOutput:
        """Return both conditionings."""
        host = comfy_host(cls.hidden.unique_id, is_vae=False)
        limit = DEFAULT_LIMIT_BYTES if budget is None else budget.device_bytes or DEFAULT_LIMIT_BYTES
        host.devices.make_room(limit)
        embeds = embed_prompts(
            [prompt, negative_prompt],
            text_encoder_path(text_encoder_name),
            host.devices.compute,
            dtype=DTYPES[dtype] or DTYPES["bf16"],
            options=EncodeOptions(limit_bytes=limit, poll=host.interrupt.check),
            cache=EmbedsCache(private_folder("embeds")) if cache else None,
        )
        return io.NodeOutput(*([[one, {}]] for one in embeds))
