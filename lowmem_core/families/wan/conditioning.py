"""What a Wan model starts from: noise, and what it is told of images.

Everything has the bits of diffusers' pipelines. Images are encoded frame by frame by the streaming encoder, and the
grey video around them is never built: it would take 0.8 GiB at 720x1280x81.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...decode.encode import encode_moments
from ...errors import RequestError
from ...shapes import FRAMES_PER_LATENT, LatentShape, VideoShape, latent_frames_of
from ...vae import normalise

PATCH = 2
_CPU = torch.device("cpu")


class KeptFrame(NamedTuple):
    """A first frame that stays as it is, for models that take a timestep per token (TI2V).

    Attributes:
        latents: ``[1, z, 1, h, w]`` float32, normalised.
        mask: ``[1, 1, F, h, w]`` float32: 0 in the first frame, 1 in those to make.
    """

    latents: Tensor
    mask: Tensor

    def applied(self, latents: Tensor) -> Tensor:
        """Return ``latents`` ``[1, z, F, h, w]`` with the kept frame in place."""
        return (1 - self.mask) * self.latents + self.mask * latents


def latent_shape(video: VideoShape, vae_scale: int, channels: int, patch: int = PATCH) -> LatentShape:
    """Return the shape of the latents of ``video``.

    Args:
        video: One frame makes an image.
        vae_scale: How many times the VAE enlarges each side: 8, or 16 for TI2V.
        channels: Latent channels of the VAE.
        patch: Side of the squares of latents that the transformer takes as one token.

    Raises:
        RequestError: The frames are not ``1 + 4 k``, or a side is not a multiple; it names the nearest that would do.
    """
    frames = latent_frames_of(video.frames)
    multiple = vae_scale * patch
    if video.height % multiple or video.width % multiple or min(video.height, video.width) < 1:
        nearest = [max(1, (side + multiple // 2) // multiple) * multiple for side in (video.width, video.height)]
        raise RequestError(
            "this model cannot make this size",
            need=f"sides that are multiples of {multiple}",
            have=f"{video.width}x{video.height}",
            remedy=f"Use {nearest[0]}x{nearest[1]}.",
        )
    return LatentShape(channels, frames, video.height // vae_scale, video.width // vae_scale)


def initial_noise(shape: LatentShape, seed: int, device: torch.device = _CPU) -> Tensor:
    """Return standard normal noise, drawn on the CPU so that a seed means the same on every device.

    Returns:
        ``[1, C, F, H, W]`` float32 on ``device``: what diffusers' pipelines draw with a CPU generator.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, *shape), generator=generator, dtype=torch.float32).to(device)


def image_condition(
    vae: nn.Module,
    shape: LatentShape,
    first: Tensor,
    last: Tensor | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return what image-to-video models get beside the latents: which frames are given, and the given frames.

    Args:
        vae: An ``AutoencoderKLWan`` on the device that computes.
        shape: Of the latents to make.
        first: ``[1, 3, H, W]`` in -1..1, any device: the first frame.
        last: The last frame, likewise.
        poll: Called before each latent frame is encoded; may raise.

    Returns:
        ``[1, 4 + z, F, h, w]`` float32 on the VAE's device: four mask channels, one for each video frame of a latent
        one, then the normalised latents of the video that is grey where nothing is given.

    Raises:
        RequestError: An image has another size, or there are too few frames to have a last one.
    """
    if last is not None and shape.frames == 1:
        raise RequestError("an image has no last frame", need="at least 5 frames", have="1 frame")
    count = 1 + FRAMES_PER_LATENT * (shape.frames - 1)
    given = {0: first} if last is None else {0: first, count - 1: last}
    latents = _encoded(vae, shape, given, count, poll)
    mask = latents.new_zeros(1, FRAMES_PER_LATENT, shape.frames, shape.height, shape.width)
    mask[:, :, 0] = 1
    if last is not None:
        mask[:, -1, -1] = 1
    return torch.cat([mask, latents], dim=1)


def kept_frame(vae: nn.Module, shape: LatentShape, first: Tensor) -> KeptFrame:
    """Return what TI2V models get of a first frame.

    Args:
        vae: An ``AutoencoderKLWan`` on the device that computes.
        shape: Of the latents to make.
        first: ``[1, 3, H, W]`` in -1..1, any device.

    Raises:
        RequestError: The image has another size.
    """
    latents = _encoded(vae, shape, {0: first}, 1, lambda: None)
    mask = latents.new_ones(1, 1, shape.frames, shape.height, shape.width)
    mask[:, :, 0] = 0
    return KeptFrame(latents, mask)


class _GreyVideo:
    """A video that is grey but for some frames, as far as the streaming encoder looks at one: slices in time.

    Args:
        frames: ``[1, 3, H, W]`` by number.
        count: Frames in all.
        like: Gives device and dtype.
    """

    ndim = 5

    def __init__(self, frames: Mapping[int, Tensor], count: int, like: Tensor) -> None:
        self._frames = frames
        self._like = like
        height, width = frames[0].shape[-2:]
        self.shape = (1, 3, count, int(height), int(width))

    def __getitem__(self, key: tuple[slice, slice, slice]) -> Tensor:
        start, stop, _ = key[2].indices(self.shape[2])
        chunk = self._like.new_zeros(1, 3, stop - start, *self.shape[3:])
        for number, frame in self._frames.items():
            if start <= number < stop:
                chunk[:, :, number - start] = frame.to(torch.float32).to(chunk)
        return chunk


def _encoded(
    vae: nn.Module, shape: LatentShape, given: Mapping[int, Tensor], count: int, poll: Callable[[], None]
) -> Tensor:
    """Return the normalised latents of a video of ``count`` frames that is grey but for those given, float32."""
    tree: Any = vae
    scale, channels = int(tree.config.scale_factor_spatial), int(tree.config.z_dim)
    if channels != shape.channels:
        raise RequestError(
            "the VAE is of another model",
            need=f"{shape.channels} latent channels",
            have=f"{channels}",
            remedy="Use the Wan 2.2 VAE with TI2V models and the Wan 2.1 VAE with all others.",
        )
    size = (1, 3, shape.height * scale, shape.width * scale)
    for image in given.values():
        if tuple(image.shape) != size:
            raise RequestError("an image has another size than the video", need=str(size), have=str(tuple(image.shape)))
    like = next(vae.parameters())
    video = cast(Tensor, _GreyVideo(given, count, like))
    means = []
    with torch.no_grad():
        poll()
        for moments in encode_moments(video, vae):
            means.append(moments[:, :channels].float())
            poll()
        return normalise(torch.cat(means, dim=2), vae)
