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
            description="Limits how much device memory a LowMem node may use.",
            inputs=[
                io.Float.Input(
                    "device_gib",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.01,
                    tooltip="GiB of device memory, weights included. 0 means all that ComfyUI can make free.",
                )
            ],
            outputs=[BUDGET.Output("budget", tooltip="Connect it to the budget input of a LowMem node.")],
        )

    @classmethod
    def execute(cls, device_gib: float) -> io.NodeOutput:
        """Return the budget; no limit of ours for 0."""
        return io.NodeOutput(MemoryBudget(device_bytes=round(device_gib * GiB) or None))
