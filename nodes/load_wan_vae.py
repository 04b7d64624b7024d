"""The node that opens a Wan VAE file."""

from __future__ import annotations

from comfy_api.latest import io

from ._comfy_host import file_mark, model_names, model_path
from ._sockets import DTYPES, WAN_VAE, WanVaeHandle


class LowmemWanVAELoader(io.ComfyNode):
    """Point to a Wan VAE file without loading it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemWanVAELoader",
            display_name="Load Wan VAE (LowMem)",
            category="LowMem",
            description="Points to a Wan VAE file. The weights are loaded by the node that uses them, "
            "and released when it is done.",
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=model_names("vae"),
                    tooltip="A Wan 2.1 or Wan 2.2 VAE in models/vae, in the original or the diffusers layout.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="Number format of the weights and of the decoding. auto keeps that of the file.",
                ),
            ],
            outputs=[WAN_VAE.Output("vae", tooltip="Connect it to Wan Streaming Decode.")],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str, dtype: str) -> tuple[int, int]:
        """Notice that the file was replaced."""
        return file_mark("vae", vae_name)

    @classmethod
    def execute(cls, vae_name: str, dtype: str) -> io.NodeOutput:
        """Return the handle."""
        return io.NodeOutput(WanVaeHandle(model_path("vae", vae_name), dtype))
