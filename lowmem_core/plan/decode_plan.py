"""The tile plan of a decode: where the up path is cut into stages, and each stage into exact tiles.

The canonical plan depends on the VAE and the frame size only, so that pixels agree across budgets and cache
placements. It is the plan with the least work (multiply-adds, and bytes moved between stages) whose activations
stay under ``CANONICAL_PEAK_BYTES`` at two bytes per element. Smaller tiles are taken only where
that does not fit the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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
    total_cost,
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
    terms = _Terms(spec, latent, element_bytes, weight_bytes, budget_bytes)
    if tiling == "off":
        return _checked(terms, whole_stage(spec, terms.area), "off")
    if isinstance(tiling, int):
        return _checked(terms, fixed_tiles(spec, terms.area, tiling), "pixels")
    if tiling != "auto":
        raise RequestError("unknown tiling", need="auto, off, blended or a tile side in pixels", have=repr(tiling))
    plan = _priced(terms, canonical_stages(spec, terms.area), "auto")
    if terms.fits(plan.activation_peak_bytes):
        return plan
    smaller_stages = cheapest_stages(spec, terms.area, element_bytes, (budget_bytes or 0) - weight_bytes)
    if smaller_stages is None:
        raise _too_small(terms)
    return replace(_priced(terms, smaller_stages, "auto"), is_canonical=False)


class _Terms(NamedTuple):
    """What every decision about one decode is made under."""

    spec: DecoderSpec
    latent: LatentShape
    element_bytes: int
    weight_bytes: int
    budget_bytes: int | None

    @property
    def area(self) -> tuple[int, int]:
        """Rows and columns of the latent."""
        return self.latent.height, self.latent.width

    @property
    def is_first(self) -> bool:
        """Return whether the first latent frame is the only one."""
        return self.latent.frames == 1

    @property
    def chunk_values(self) -> int:
        """Values in the largest chunk of frames."""
        frames = self.spec.frames_before(len(self.spec.layers), self.is_first)
        return self.latent.height * self.latent.width * self.spec.scale**2 * RGB * frames

    @property
    def whole_multiply_adds(self) -> int:
        """Multiply-adds of a later latent frame without tiles."""
        return total_cost(self.spec, whole_stage(self.spec, self.area)[0], self.element_bytes).multiply_adds

    def fits(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` beside the weights are within the budget."""
        return self.budget_bytes is None or self.weight_bytes + nbytes <= self.budget_bytes

    def refuse_unless_fits(self, tiling: str, nbytes: int) -> None:
        """Raise ``BudgetError`` for an explicit ``tiling`` that needs ``nbytes`` and does not fit."""
        if self.budget_bytes is None or self.fits(nbytes):
            return
        least = self.weight_bytes + nbytes
        raise BudgetError(
            f"a decode with tiling {tiling} does not fit the device budget",
            need=format_bytes(least),
            have=format_bytes(self.budget_bytes),
            remedy='Raise the budget, or set tiling to "auto", which takes tiles that fit.',
            smallest_bytes=least,
        )


def _checked(terms: _Terms, stages: tuple[StagePlan, ...], tiling: str) -> DecodePlan:
    """Price an explicit choice of tiles, and refuse it when it does not fit: it is never changed for the user."""
    plan = _priced(terms, stages, tiling)
    terms.refuse_unless_fits(tiling, plan.activation_peak_bytes)
    is_canonical = tiling == "off" or stages == canonical_stages(terms.spec, terms.area)
    return replace(plan, is_canonical=is_canonical)


def _too_small(terms: _Terms) -> BudgetError:
    low, high = 0, CANONICAL_PEAK_BYTES

    def is_enough(limit: int) -> bool:
        return cheapest_stages(terms.spec, terms.area, terms.element_bytes, limit) is not None

    while not is_enough(high):
        low, high = high, high * 2
    while high - low > MiB // 4:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    smallest = terms.weight_bytes + high
    weights = format_bytes(terms.weight_bytes)
    return BudgetError(
        "the device budget is too small for one tile of this decode",
        need=f"at least {format_bytes(smallest)} ({smallest} bytes), of which weights {weights}",
        have=format_bytes(terms.budget_bytes or 0),
        remedy="Raise the budget, decode a smaller size, or use bf16.",
        smallest_bytes=smallest,
    )


def _priced(terms: _Terms, stages: tuple[StagePlan, ...], tiling: str) -> DecodePlan:
    spec, element_bytes, is_first = terms.spec, terms.element_bytes, terms.is_first
    totals = [total_cost(spec, stage, element_bytes) for stage in stages]
    peak = max(largest_cost(spec, stage, element_bytes, is_first=is_first).peak_bytes for stage in stages)
    caches = 0 if is_first else sum(total.cache_bytes for total in totals)
    # Each stage keeps the state that its last tile replaced, to write the next one's into.
    spare = 0 if is_first else sum(largest_cost(spec, s, element_bytes, is_first=False).cache_bytes for s in stages)
    fits = terms.fits(peak + caches + spare)
    buffers, bus = _buffer_bytes(spec, stages, element_bytes, is_first)
    return DecodePlan(
        tiling=tiling,
        stages=stages,
        is_canonical=True,
        has_device_caches=fits,
        weight_bytes=terms.weight_bytes,
        activation_peak_bytes=peak,
        device_cache_bytes=caches + spare if fits else 0,
        host_bytes=(0 if fits else caches + spare)
        + buffers
        + terms.chunk_values * (element_bytes + 2 * FRAME_ELEMENT_BYTES),
        bus_bytes_per_latent_frame=bus + (0 if fits else 2 * caches) + terms.chunk_values * element_bytes,
        multiply_adds=sum(total.multiply_adds for total in totals),
        whole_multiply_adds=terms.whole_multiply_adds,
    )


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
    terms = _Terms(spec, latent, element_bytes, weight_bytes, budget_bytes)
    stop = len(spec.layers)
    largest = stage_cost(spec, 0, stop, Block(1, max(heights), max(widths), element_bytes), terms.is_first)
    everything = stage_cost(spec, 0, stop, Block(1, sum(heights), sum(widths), element_bytes), False)
    caches = 0 if terms.is_first else everything.cache_bytes + largest.cache_bytes
    terms.refuse_unless_fits("blended", largest.peak_bytes)
    fits = terms.fits(largest.peak_bytes + caches)
    return DecodePlan(
        tiling="blended",
        stages=(),
        is_canonical=False,
        has_device_caches=fits,
        weight_bytes=weight_bytes,
        activation_peak_bytes=largest.peak_bytes,
        device_cache_bytes=caches if fits else 0,
        host_bytes=(0 if fits else caches) + terms.chunk_values * (3 * element_bytes + 2 * FRAME_ELEMENT_BYTES),
        bus_bytes_per_latent_frame=(0 if fits else 2 * everything.cache_bytes) + 2 * terms.chunk_values * element_bytes,
        multiply_adds=everything.multiply_adds,
        whole_multiply_adds=terms.whole_multiply_adds,
        overlap_pixels=(tile_pixels, stride_pixels),
    )
