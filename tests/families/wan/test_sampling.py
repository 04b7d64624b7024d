"""A whole run equals diffusers' pipelines bit for bit in float32, for every kind of Wan model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from lowmem_core.denoise import SAMPLERS, SamplerSettings, denoise, make_stepper
from lowmem_core.errors import RequestError
from lowmem_core.families.wan.conditioning import image_condition, initial_noise, kept_frame, latent_shape
from lowmem_core.families.wan.sampling import (
    Conditioning,
    Experts,
    Guidance,
    ModelOptions,
    WanModel,
    one_at_a_time,
)
from lowmem_core.shapes import VideoShape
from lowmem_core.tiny.wan_vae import tiny_wan_vae_tensors
from lowmem_core.vae import wan_vae_from_tensors

HEIGHT, WIDTH, FRAMES, STEPS, SHIFT, SEED = 32, 64, 5, 4, 5.0, 3
KINDS: dict[str, dict[str, Any]] = {
    "t2v": {"in_channels": 16, "out_channels": 16},
    "i2v": {"in_channels": 36, "out_channels": 16},
    "i2v_image": {"in_channels": 36, "out_channels": 16, "image_dim": 48, "added_kv_proj_dim": 32},
    "ti2v": {"in_channels": 48, "out_channels": 48},
}


def transformer(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny transformer whose tables and norms all matter."""
    config = {"num_attention_heads": 2, "attention_head_dim": 16, "text_dim": 32, "ffn_dim": 64, "num_layers": 2}
    torch.manual_seed(seed)
    module = WanTransformer3DModel(**{**config, **KINDS[kind], **changes})
    for parameter in module.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return module.requires_grad_(False).eval()


def embeds(seed: int, rows: int = 12, width: int = 32) -> Tensor:
    """Return seeded embeddings."""
    return torch.randn(1, rows, width, generator=torch.Generator().manual_seed(seed))


def picture(seed: int) -> Tensor:
    """Return a seeded image in 0..1, as diffusers takes one."""
    return torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def vaes() -> dict[str, Any]:
    """Return a tiny VAE of each kind."""
    return {kind: wan_vae_from_tensors(tiny_wan_vae_tensors(kind, seed=1), torch.float32) for kind in ("2.1", "2.2")}


def diffusers_run(kind: type, sampler: str, vae: Any, parts: dict[str, Any], call: dict[str, Any]) -> Tensor:
    """Return the latents of a diffusers pipeline."""
    scheduler: Any = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    if sampler == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipe: Any = kind(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    common = {
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": STEPS,
        "prompt_embeds": embeds(1),
        "negative_prompt_embeds": embeds(2),
        "generator": torch.Generator().manual_seed(SEED),
        "output_type": "latent",
    }
    result: Tensor = pipe(**(common | call)).frames
    return result


def our_run(
    sampler: str,
    vae: Any,
    experts: Experts,
    told: dict[str, Any],
    guidance: Guidance,
    frames: int = FRAMES,
    options: ModelOptions | None = None,
) -> Tensor:
    """Return the latents of our loop."""
    stepper = make_stepper(SamplerSettings(sampler, STEPS, SHIFT))
    shape = latent_shape(VideoShape(frames, HEIGHT, WIDTH), vae.config.scale_factor_spatial, vae.config.z_dim)
    conditioning = Conditioning(**({"prompt_embeds": embeds(1), "negative_prompt_embeds": embeds(2)} | told))
    model = WanModel(experts, conditioning, guidance, stepper.timesteps, options)
    return model.finish(denoise(model, stepper.begin(noise=initial_noise(shape, SEED)), stepper))


def shape_in(vae: Any) -> Any:
    """Return the latent shape of the usual test video."""
    return latent_shape(VideoShape(FRAMES, HEIGHT, WIDTH), vae.config.scale_factor_spatial, vae.config.z_dim)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("frames", "scale"), [(5, 5.0), (1, 4.0), (5, 1.0)])
def test_text_to_video_equals_diffusers(sampler: str, frames: int, scale: float, vaes: dict[str, Any]) -> None:
    """With guidance, as a single image, and without guidance in one pass."""
    module = transformer("t2v")
    expected = diffusers_run(
        WanPipeline, sampler, vaes["2.1"], {"transformer": module}, {"num_frames": frames, "guidance_scale": scale}
    )
    told = {} if scale > 1 else {"negative_prompt_embeds": None}
    assert torch.equal(our_run(sampler, vaes["2.1"], Experts(module), told, Guidance(scale), frames), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("boundary", [0.875, 0.95, 0.0])
@pytest.mark.parametrize("low_scale", [3.0, None])
def test_two_experts_equal_diffusers(
    sampler: str, boundary: float, low_scale: float | None, vaes: dict[str, Any]
) -> None:
    """Each has its steps and its guidance; at a boundary of 0 the second has none."""
    high, low = transformer("t2v", 0), transformer("t2v", 1)
    expected = diffusers_run(
        WanPipeline,
        sampler,
        vaes["2.1"],
        {"transformer": high, "transformer_2": low, "boundary_ratio": boundary},
        {"guidance_scale": 4.0, "guidance_scale_2": low_scale},
    )
    experts = Experts(high, low, boundary)
    assert torch.equal(our_run(sampler, vaes["2.1"], experts, {}, Guidance(4.0, low_scale)), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("has_last", [False, True])
def test_image_to_video_2_2_equals_diffusers(sampler: str, has_last: bool, vaes: dict[str, Any]) -> None:
    """Two experts, with a first frame or with first and last."""
    vae, high, low = vaes["2.1"], transformer("i2v", 0), transformer("i2v", 1)
    first, last = picture(0), picture(1) if has_last else None
    expected = diffusers_run(
        WanImageToVideoPipeline,
        sampler,
        vae,
        {"transformer": high, "transformer_2": low, "boundary_ratio": 0.9},
        {"image": first, "last_image": last, "guidance_scale": 3.5},
    )
    condition = image_condition(vae, shape_in(vae), 2 * first - 1, None if last is None else 2 * last - 1)
    told = {"image_condition": condition}
    assert torch.equal(our_run(sampler, vae, Experts(high, low, 0.9), told, Guidance(3.5)), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("has_last", [False, True])
def test_image_to_video_2_1_equals_diffusers(sampler: str, has_last: bool, vaes: dict[str, Any]) -> None:
    """With image embeds; those of first and last frame come as two images and get positions of their own."""
    vae, rows = vaes["2.1"], 257
    module = transformer("i2v_image", pos_embed_seq_len=2 * rows if has_last else None)
    image_embeds = torch.cat([embeds(5 + number, rows, 48) for number in range(2 if has_last else 1)])
    first, last = picture(0), picture(1) if has_last else None
    pipe_embeds = image_embeds

    class Pipeline(WanImageToVideoPipeline):
        def encode_image(self, image: Any, device: Any = None) -> Tensor:
            return pipe_embeds

    parts = {"transformer": module, "image_encoder": None, "image_processor": None}
    expected = diffusers_run(Pipeline, sampler, vae, parts, {"image": first, "last_image": last})
    condition = image_condition(vae, shape_in(vae), 2 * first - 1, None if last is None else 2 * last - 1)
    told = {"image_condition": condition, "image_embeds": image_embeds}
    assert torch.equal(our_run(sampler, vae, Experts(module), told, Guidance(5.0)), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("has_first", [False, True])
def test_ti2v_equals_diffusers(sampler: str, has_first: bool, vaes: dict[str, Any]) -> None:
    """With and without a first frame, each token has its timestep."""
    vae, module = vaes["2.2"], transformer("ti2v")
    kind: type = WanImageToVideoPipeline if has_first else WanPipeline
    given = {"image": picture(0)} if has_first else {}
    expected = diffusers_run(kind, sampler, vae, {"transformer": module, "expand_timesteps": True}, given)
    told: dict[str, Any] = {"per_token_timesteps": True}
    if has_first:
        told["kept_frame"] = kept_frame(vae, shape_in(vae), 2 * picture(0) - 1)
    result = our_run(sampler, vae, Experts(module), told, Guidance(5.0))
    assert torch.equal(result, expected)
    if has_first:
        assert torch.equal(result[:, :, :1], told["kept_frame"].latents)


def model_of(experts: Experts, told: dict[str, Any] | None = None, **options: Any) -> WanModel:
    """Return a model over four steps of UniPC."""
    conditioning = Conditioning(**({"prompt_embeds": embeds(1), "negative_prompt_embeds": embeds(2)} | (told or {})))
    timesteps = make_stepper(SamplerSettings("unipc", STEPS, SHIFT)).timesteps
    return WanModel(experts, conditioning, Guidance(4.0, 1.0), timesteps, ModelOptions(**options))


def latents_of(channels: int = 16) -> Tensor:
    """Return seeded latents."""
    return torch.randn(1, channels, 2, 4, 8, generator=torch.Generator().manual_seed(0))


def test_the_next_expert_is_announced_before_each_step() -> None:
    """A streamer can fetch its first block while the last one of this expert runs."""
    high, low = transformer("t2v", 0), transformer("t2v", 1)
    names = {id(high): "high", id(low): "low", id(None): None}
    seen = []
    model = model_of(
        Experts(high, low, 0.9), on_expert=lambda one, following: seen.append((names[id(one)], names[id(following)]))
    )
    timesteps = make_stepper(SamplerSettings("unipc", STEPS, SHIFT)).timesteps
    for index in range(STEPS):
        model(latents_of(), timesteps[index], index)
    assert seen == [("high", "high"), ("high", "low"), ("low", "low"), ("low", None)]
    assert [model.expert_for(index) is high for index in range(STEPS)] == [True, True, False, False]


def test_guidance_off_for_one_expert_saves_its_pass() -> None:
    """Fast LoRAs are often used on one expert only."""
    high, low = transformer("t2v", 0), transformer("t2v", 1)
    counts: list[int] = []

    def counting(*given: Any, poll: Any) -> list[Tensor]:
        counts.append(len(given[3]))
        return one_at_a_time(*given, poll=poll)

    model = model_of(Experts(high, low, 0.9), run_passes=counting)
    timesteps = make_stepper(SamplerSettings("unipc", STEPS, SHIFT)).timesteps
    for index in range(STEPS):
        model(latents_of(), timesteps[index], index)
    assert counts == [2, 2, 1, 1]


def test_a_run_can_be_stopped_between_passes() -> None:
    """The stop button is polled before each."""
    calls = []

    def poll() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    model = model_of(Experts(transformer("t2v")), poll=poll)
    with pytest.raises(InterruptedError):
        model(latents_of(), torch.tensor(999), 0)


def test_embeds_and_latents_reach_the_model_in_its_type() -> None:
    """bf16 transformers get bf16, whatever they are told in, and the callers' tensors stay as they are."""
    module = transformer("t2v").to(torch.bfloat16)
    seen = []

    def runner(one: nn.Module, hidden_states: Tensor, timestep: Tensor, passes: Any, *, poll: Any) -> list[Tensor]:
        seen.extend([hidden_states.dtype, timestep.dtype, *(each.encoder_hidden_states.dtype for each in passes)])
        return [hidden_states, hidden_states]

    model_of(Experts(module), run_passes=runner)(latents_of(), torch.tensor(999), 0)
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]


def test_timesteps_per_token_stay_exact_in_bfloat16() -> None:
    """bf16 has steps of 4 above 512; timesteps are float32 and built on the CPU."""
    module = transformer("ti2v").to(torch.bfloat16)
    seen = []

    def runner(one: nn.Module, hidden_states: Tensor, timestep: Tensor, passes: Any, *, poll: Any) -> list[Tensor]:
        seen.append(timestep)
        return [hidden_states, hidden_states]

    told = {"per_token_timesteps": True}
    model_of(Experts(module), told, run_passes=runner, host_timesteps=True)(latents_of(48), torch.tensor(523.4), 0)
    assert seen[0].dtype == torch.float32
    assert seen[0].shape == (1, 2 * 2 * 4)
    assert torch.equal(seen[0].unique(), torch.tensor([523.4]))


def test_experts_of_two_kinds_are_refused() -> None:
    """The message names what differs."""
    with pytest.raises(RequestError, match=r"another kind.*need in_channels 36; have in_channels 16"):
        Experts(transformer("i2v"), transformer("t2v"), 0.9)


@pytest.mark.parametrize("parts", [{"boundary_ratio": 0.9}, {"low_noise": True}])
def test_a_boundary_and_two_experts_belong_together(parts: dict[str, Any]) -> None:
    """One without the other cannot tell which runs."""
    module = transformer("t2v")
    given = {name: module if name == "low_noise" else value for name, value in parts.items()}
    with pytest.raises(RequestError, match="boundary"):
        Experts(module, **given)


@pytest.mark.parametrize(
    ("kind", "told", "message"),
    [
        ("t2v", {"negative_prompt_embeds": None}, "needs a negative prompt"),
        ("t2v", {"image_embeds": embeds(1, 257, 48)}, "image embeds belong to"),
        ("i2v_image", {"image_condition": torch.zeros(1, 20, 2, 4, 8)}, "need CLIP embeds of width 48"),
        ("i2v", {}, "need 20 channels beside the latents; have 0"),
        ("t2v", {"image_condition": torch.zeros(1, 20, 2, 4, 8)}, "need 0 channels beside the latents; have 20"),
    ],
)
def test_conditions_that_do_not_belong_to_the_model_are_refused(kind: str, told: dict[str, Any], message: str) -> None:
    """A model ignores or misreads what it was not trained for, in silence."""
    with pytest.raises(RequestError, match=message):
        model_of(Experts(transformer(kind)), told)


def test_a_frame_is_kept_only_with_timesteps_per_token(vaes: dict[str, Any]) -> None:
    """Other models would change it."""
    kept = kept_frame(vaes["2.2"], shape_in(vaes["2.2"]), picture(0))
    with pytest.raises(RequestError, match="timestep per token"):
        Conditioning(embeds(1), kept_frame=kept)
    assert replace(Conditioning(embeds(1), per_token_timesteps=True), kept_frame=kept).kept_frame is kept
