"""What a Wan denoise is asked, and what it says it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory import MemoryBudget, MemoryReport
from ..plan.denoise_plan import RESIDENT, DenoisePlan
from ..units import format_bytes
from .saving import RunSaving

if TYPE_CHECKING:
    from torch import Tensor

    from ..denoise import Fingerprint, SamplerSettings, SavedRun
    from ..families.wan.config import WanConfig
    from ..families.wan.models import WanFiles
    from ..families.wan.sampling import Conditioning, Guidance
    from ..shapes import LatentShape


@dataclass(frozen=True)
class WanRequest:
    """A Wan denoise.

    Attributes:
        files: The transformers and what is put on them.
        shape: Of the latents to make.
        conditioning: What the model is told.
        sampler: How noise becomes latents.
        guidance: How strongly the prompt is followed.
        seed: Of the noise.
        latents: ``[1, z, F, h, w]`` raw latents to start from, or None for noise alone.
        adds_noise: Whether noise is added to them; if not, they hold that of the first step, as ComfyUI hands it on.
        memory_mode: ``resident`` (the plain path) or ``stream``; never changed.
        budget: Limits; the device limit holds for weights and activations together.
        saving: Where the run is saved, or None.
        to_picture: Turns clean latents ``[1, z, F, h, w]`` into ``[H, W, 3]`` RGB in 0..1, for previews.
    """

    files: WanFiles
    shape: LatentShape
    conditioning: Conditioning
    sampler: SamplerSettings
    guidance: Guidance
    seed: int = 0
    latents: Tensor | None = None
    adds_noise: bool = True
    memory_mode: str = RESIDENT
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    saving: RunSaving | None = None
    to_picture: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class WanReport:
    """What a denoise did.

    Attributes:
        latents: ``[1, z, F, h, w]`` raw latents, float32 on the CPU.
        plan: The plan that was followed.
        memory: Planned and measured bytes.
        source: Where weights waited: ``host`` or ``disk``.
        steps_s: Seconds of each step that was taken; steps of an earlier try are missing.
        streamed_bytes: Bytes that crossed the bus block by block.
        total_s: Seconds from the plan to the latents.
        saved: The saved run; call ``finish`` on it once the latents are safe.
    """

    latents: Tensor
    plan: DenoisePlan
    memory: MemoryReport
    source: str
    steps_s: tuple[float, ...]
    streamed_bytes: int
    total_s: float
    saved: SavedRun | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        from ..denoise import tensor_sha256

        return {
            "latents_sha256": tensor_sha256(self.latents),
            "steps_s": [round(step_s, 3) for step_s in self.steps_s],
            "planned_peak_bytes": self.memory.planned_peak_bytes,
            "measured_peak_bytes": self.memory.measured_peak_bytes,
            "measured_by": self.memory.measured_by,
            "streamed_bytes": self.streamed_bytes,
            "memory_mode": self.plan.memory_mode,
            "shares_blocks": self.plan.shares_blocks,
            "weights_in": self.source,
            "denoise_s": round(self.total_s, 3),
        }

    def summary(self) -> str:
        """Return a few lines for people."""
        each = f", {sum(self.steps_s) / len(self.steps_s):.2f} s a step" if self.steps_s else ""
        return (
            f"{len(self.steps_s)} steps in {self.total_s:.1f} s{each}; weights from {self.source}\n"
            f"{self.plan}; streamed {format_bytes(self.streamed_bytes)}\n{self.memory}"
        )


def saved_run_of(request: WanRequest, config: WanConfig) -> SavedRun | None:
    """Return where the run is saved."""
    return None if request.saving is None else request.saving.saved_run(fingerprint_of(request, config))


def fingerprint_of(request: WanRequest, config: WanConfig) -> Fingerprint:
    """Return what makes two requests the same: all that decides the result, and not where weights live."""
    from ..denoise import Fingerprint

    told = request.conditioning
    settings = {
        "sampler": asdict(request.sampler),
        "guidance": asdict(request.guidance),
        "boundary": request.files.boundary(config),
        "dtype": str(request.files.dtype),
        "seed": request.seed,
        "adds_noise": request.adds_noise,
        "shape": list(request.shape),
    }
    tensors = {
        "prompt": told.prompt_embeds,
        "negative": told.negative_prompt_embeds,
        "image": told.image_embeds,
        "condition": told.image_condition,
        "kept": None if told.kept_frame is None else told.kept_frame.latents,
        "latents": request.latents,
    }
    scale = 8 * (2 if config.has_timestep_per_token else 1)
    what = f"{request.files.high_noise.name}, {request.shape.video(scale)}, seed {request.seed}"
    return Fingerprint.of(request.files.paths, settings, tensors, request.files.loras, what)
