"""The tile plan of a decode: where the up path is cut into stages, and each stage into exact tiles.

The canonical plan depends on the VAE and the frame size only, so that pixels agree across budgets and cache
placements. It is the plan with the least work (multiply-adds, and bytes moved between stages) whose activations
stay under ``CANONICAL_PEAK_BYTES`` at two bytes per element. Smaller tiles are taken only where
that does not fit the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import BudgetError, RequestError
from ..shapes import LatentShape
from ..units import MiB, format_bytes
from .activations import Block, skip_bytes, stage_cost
from .decoder_spec import DecoderSpec
from .grid import total_extent
from .stage_search import (
    CANONICAL_PEAK_BYTES,
    StagePlan,
    canonical_stages,
    cheapest_stages,
    fixed_tiles,
    largest_cost,
    stage_work,
    whole_stage,
)

FRAME_ELEMENT_BYTES = 4
RGB = 3


@dataclass(frozen=True)
class DecodePlan:
    """Everything decided about a decode before it starts; bytes and counts are integers.

    Attributes:
        tiling: ``auto``, ``off``, ``blended`` or ``pixels``.
        stages: In order of execution.
        is_canonical: The pixels are those of the canonical plan ("exact"), else "within one level" of it.
        has_device_caches: The causal caches live on the device.
        weight_bytes: Decoder weights on the device.
        activation_peak_bytes: Worst moment of activations on the device, weights and caches apart.
        device_cache_bytes: Causal caches on the device.
        host_bytes: Causal caches, stage buffers and the frame chunk in host memory.
        bus_bytes_per_latent_frame: Copied between host and device for one latent frame.
        multiply_adds: Of one later latent frame, halos included.
        whole_multiply_adds: Of the same without tiles.
        overlap_pixels: Tile and stride of ``blended``, in pixels; None otherwise.
    """

    tiling: str
    stages: tuple[StagePlan, ...]
    is_canonical: bool
    has_device_caches: bool
    weight_bytes: int
    activation_peak_bytes: int
    device_cache_bytes: int
    host_bytes: int
    bus_bytes_per_latent_frame: int
    multiply_adds: int
    whole_multiply_adds: int
    overlap_pixels: tuple[int, int] | None = None

    @property
    def planned_peak_bytes(self) -> int:
        """Weights, activations and device caches together."""
        return self.weight_bytes + self.activation_peak_bytes + self.device_cache_bytes

    @property
    def work_ratio(self) -> float:
        """Multiply-adds over those of the untiled decode."""
        return self.multiply_adds / self.whole_multiply_adds

    @property
    def tile_count(self) -> int:
        """Tiles run for one latent frame, all stages together."""
        return sum(stage.rows * stage.cols for stage in self.stages)


def plan_decode(
    spec: DecoderSpec,
    latent: LatentShape,
    element_bytes: int,
    tiling: str | int = "auto",
    *,
    weight_bytes: int = 0,
    budget_bytes: int | None = None,
) -> DecodePlan:
    """Decide stages, tiles and cache placement of a decode.

    Args:
        spec: The decoder.
        latent: Size of the latent.
        element_bytes: 2 for bf16 and fp16, 4 for fp32.
        tiling: ``auto``, ``off``, or the side of an exact tile in pixels.
        weight_bytes: Decoder weights that will be on the device.
        budget_bytes: Device limit for weights, activations and caches; None is no limit.

    Raises:
        RequestError: ``tiling`` is unknown.
        BudgetError: Nothing fits; it names the smallest budget that works.
    """
    area = (latent.height, latent.width)
    room = None if budget_bytes is None else budget_bytes - weight_bytes
    if tiling == "off":
        return _checked(spec, latent, element_bytes, whole_stage(spec, area), weight_bytes, budget_bytes, "off")
    if isinstance(tiling, int):
        stages = fixed_tiles(spec, area, tiling)
        return _checked(spec, latent, element_bytes, stages, weight_bytes, budget_bytes, "pixels")
    if tiling != "auto":
        raise RequestError("unknown tiling", need="auto, off, blended or a tile side in pixels", have=repr(tiling))
    canonical = canonical_stages(spec, area)
    plan = _priced(spec, latent, element_bytes, canonical, weight_bytes, budget_bytes, "auto")
    if room is None or plan.activation_peak_bytes <= room:
        return plan
    smaller_stages = cheapest_stages(spec, area, element_bytes, room)
    if smaller_stages is None:
        raise _too_small(spec, area, element_bytes, weight_bytes, budget_bytes or 0)
    smaller = _priced(spec, latent, element_bytes, smaller_stages, weight_bytes, budget_bytes, "auto")
    return replace(smaller, is_canonical=False)


def _checked(
    spec: DecoderSpec,
    latent: LatentShape,
    element_bytes: int,
    stages: tuple[StagePlan, ...],
    weight_bytes: int,
    budget_bytes: int | None,
    tiling: str,
) -> DecodePlan:
    """Price an explicit choice of tiles, and refuse it when it does not fit: it is never changed for the user."""
    plan = _priced(spec, latent, element_bytes, stages, weight_bytes, budget_bytes, tiling)
    least = weight_bytes + plan.activation_peak_bytes
    if budget_bytes is not None and least > budget_bytes:
        raise _refused(tiling, least, budget_bytes)
    canonical = canonical_stages(spec, (latent.height, latent.width))
    return replace(plan, is_canonical=stages == canonical or tiling == "off")


def _too_small(
    spec: DecoderSpec, area: tuple[int, int], element_bytes: int, weight_bytes: int, budget_bytes: int
) -> BudgetError:
    low, high = 0, CANONICAL_PEAK_BYTES
    while cheapest_stages(spec, area, element_bytes, high) is None:
        low, high = high, high * 2
    while high - low > MiB // 4:
        middle = (low + high) // 2
        low, high = (low, middle) if cheapest_stages(spec, area, element_bytes, middle) else (middle, high)
    smallest = weight_bytes + high
    return BudgetError(
        "the device budget is too small for one tile of this decode",
        need=f"at least {format_bytes(smallest)} ({smallest} bytes), of which weights {format_bytes(weight_bytes)}",
        have=format_bytes(budget_bytes),
        remedy="Raise the budget, decode a smaller size, or use bf16.",
        smallest_bytes=smallest,
    )


def _priced(
    spec: DecoderSpec,
    latent: LatentShape,
    element_bytes: int,
    stages: tuple[StagePlan, ...],
    weight_bytes: int,
    budget_bytes: int | None,
    tiling: str,
) -> DecodePlan:
    is_first = latent.frames == 1
    peak = max(largest_cost(spec, stage, element_bytes, is_first=is_first).peak_bytes for stage in stages)
    caches = 0 if is_first else sum(_cache_bytes(spec, stage, element_bytes) for stage in stages)
    spare = 0 if is_first else max(largest_cost(spec, s, element_bytes, is_first=False).cache_bytes for s in stages)
    fits = budget_bytes is None or weight_bytes + peak + caches + spare <= budget_bytes
    buffers, bus = _buffer_bytes(spec, stages, element_bytes, is_first)
    chunk = latent.height * latent.width * spec.scale**2 * RGB * spec.frames_before(len(spec.layers), is_first)
    on_host = 0 if fits else caches + spare
    return DecodePlan(
        tiling=tiling,
        stages=stages,
        is_canonical=True,
        has_device_caches=fits,
        weight_bytes=weight_bytes,
        activation_peak_bytes=peak,
        device_cache_bytes=caches + spare if fits else 0,
        host_bytes=on_host + buffers + chunk * (element_bytes + 2 * FRAME_ELEMENT_BYTES),
        bus_bytes_per_latent_frame=bus + (0 if fits else 2 * caches) + chunk * element_bytes,
        multiply_adds=sum(stage_work(spec, stage) for stage in stages),
        whole_multiply_adds=stage_work(spec, whole_stage(spec, (latent.height, latent.width))[0]),
    )


def _cache_bytes(spec: DecoderSpec, stage: StagePlan, element_bytes: int) -> int:
    height = total_extent(stage.height, stage.rows, stage.halo)
    width = total_extent(stage.width, stage.cols, stage.halo)
    block = Block(spec.frames_before(stage.start, False), height, width, element_bytes)
    return stage_cost(spec, stage.start, stage.stop, block, False).cache_bytes


def _buffer_bytes(
    spec: DecoderSpec, stages: tuple[StagePlan, ...], element_bytes: int, is_first: bool
) -> tuple[int, int]:
    """Return the bytes of the buffers between stages, and those copied into and out of them."""
    largest = bus = previous = 0
    for stage in stages[1:]:
        frames = spec.frames_before(stage.start, is_first)
        block = Block(frames, stage.height, stage.width, element_bytes)
        channels = spec.channels_before(stage.start)
        size = block.nbytes(channels) + skip_bytes(spec, stage.start, block, is_first)
        read = total_extent(stage.height, stage.rows, stage.halo) * total_extent(stage.width, stage.cols, stage.halo)
        bus += size + size * read // (stage.height * stage.width)
        largest, previous = max(largest, size + previous), size
    return largest, bus


def plan_blended(
    spec: DecoderSpec,
    latent: LatentShape,
    element_bytes: int,
    *,
    weight_bytes: int = 0,
    budget_bytes: int | None = None,
    tile_pixels: int = 256,
    stride_pixels: int = 192,
) -> DecodePlan:
    """Decide a decode in overlapping, cross-faded tiles, as diffusers' ``tiled_decode`` does by default.

    Raises:
        BudgetError: One tile does not fit.
    """
    side, stride = tile_pixels // spec.scale, stride_pixels // spec.scale
    heights = [min(side, latent.height - top) for top in range(0, latent.height, stride)]
    widths = [min(side, latent.width - left) for left in range(0, latent.width, stride)]
    is_first = latent.frames == 1
    stop = len(spec.layers)
    largest = stage_cost(spec, 0, stop, Block(1, max(heights), max(widths), element_bytes), is_first)
    everything = stage_cost(spec, 0, stop, Block(1, sum(heights), sum(widths), element_bytes), False)
    whole = stage_work(spec, whole_stage(spec, (latent.height, latent.width))[0])
    caches = 0 if is_first else everything.cache_bytes + largest.cache_bytes
    least = weight_bytes + largest.peak_bytes
    if budget_bytes is not None and least > budget_bytes:
        raise _refused("blended", least, budget_bytes)
    fits = budget_bytes is None or least + caches <= budget_bytes
    frame = latent.height * latent.width * spec.scale**2 * RGB * spec.frames_before(stop, is_first)
    return DecodePlan(
        tiling="blended",
        stages=(),
        is_canonical=False,
        has_device_caches=fits,
        weight_bytes=weight_bytes,
        activation_peak_bytes=largest.peak_bytes,
        device_cache_bytes=caches if fits else 0,
        host_bytes=(0 if fits else caches) + frame * (3 * element_bytes + 2 * FRAME_ELEMENT_BYTES),
        bus_bytes_per_latent_frame=(0 if fits else 2 * everything.cache_bytes) + 2 * frame * element_bytes,
        multiply_adds=everything.multiply_adds,
        whole_multiply_adds=whole,
        overlap_pixels=(tile_pixels, stride_pixels),
    )


def _refused(tiling: str, least: int, budget_bytes: int) -> BudgetError:
    return BudgetError(
        f"a decode with tiling {tiling} does not fit the device budget",
        need=format_bytes(least),
        have=format_bytes(budget_bytes),
        remedy='Raise the budget, or set tiling to "auto", which takes tiles that fit.',
        smallest_bytes=least,
    )
