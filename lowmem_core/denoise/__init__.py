"""The denoising stage: samplers, the loop, and runs that survive being stopped."""

from .stepper import EULER, SAMPLERS, UNIPC, SamplerSettings, Stepper, StepperState, make_stepper

__all__ = ["EULER", "SAMPLERS", "UNIPC", "SamplerSettings", "Stepper", "StepperState", "make_stepper"]
