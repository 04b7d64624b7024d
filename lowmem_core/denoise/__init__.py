"""The denoising stage: samplers, the loop, and runs that survive being stopped."""

from .fingerprint import FileMark, Fingerprint, LoraUse, file_marks, tensor_sha256
from .loop import Model, StepResult, denoise, previewing
from .run_store import DEFAULT_CAP_BYTES, RunInfo, RunStore, SavedState, save_latents
from .saved_run import Progressed, SavedRun, SavePolicy
from .stepper import EULER, SAMPLERS, UNIPC, SamplerSettings, Stepper, StepperState, make_stepper

__all__ = [
    "DEFAULT_CAP_BYTES",
    "EULER",
    "SAMPLERS",
    "UNIPC",
    "FileMark",
    "Fingerprint",
    "LoraUse",
    "Model",
    "Progressed",
    "RunInfo",
    "RunStore",
    "SamplerSettings",
    "SavePolicy",
    "SavedRun",
    "SavedState",
    "StepResult",
    "Stepper",
    "StepperState",
    "denoise",
    "file_marks",
    "make_stepper",
    "previewing",
    "save_latents",
    "tensor_sha256",
]
