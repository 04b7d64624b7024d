"""The node that limits what other nodes may use."""

from __future__ import annotations

from comfy_api.latest import io

from ..lowmem_core.memory import MemoryBudget
from ..lowmem_core.units import GiB
from ._sockets import BUDGET


class LowmemMemoryBudget(io.ComfyNode):
    """Make a memory budget."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node."""
        return io.Schema(
            node_id="LowmemMemoryBudget",
            display_name="Memory Budget",
            category="LowMem",
            description="Limits how much memory a LowMem node may use.",
            inputs=[
                io.Float.Input(
                    "device_gib",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.01,
                    tooltip="GiB of device memory, weights included. 0 means all that ComfyUI can make free.",
                ),
                io.Float.Input(
                    "host_gib",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.1,
                    optional=True,
                    tooltip="GiB of host memory for weights; a model beyond it is read from disk block by block. "
                    "0 means most of what is free.",
                ),
            ],
            outputs=[BUDGET.Output("budget", tooltip="Connect it to the budget input of a LowMem node.")],
        )

    @classmethod
    def execute(cls, device_gib: float, host_gib: float = 0.0) -> io.NodeOutput:
        """Return the budget; no limit of ours for 0."""
        device_bytes, host_bytes = (round(gib * GiB) or None for gib in (device_gib, host_gib))
        return io.NodeOutput(MemoryBudget(device_bytes=device_bytes, host_bytes=host_bytes))
