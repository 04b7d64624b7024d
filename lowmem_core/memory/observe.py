"""Seeing every operator that really runs.

Under ``torch.inference_mode`` a dispatch mode is handed composite operators whole (``linear``, ``conv3d``), and what
they allocate inside would stay unseen. The mode below takes them apart first, with the kernel torch itself runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class ObservingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes each operator that is not a composite of others to ``observe``."""

    def __torch_dispatch__(
        self,
        func: OpOverload[Any, Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take composite operators apart; observe the others."""
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return self.observe(func, args, kwargs)

    @abstractmethod
    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` and return its result."""


@cache
def _is_composite(func: Callable[..., Any]) -> bool:
    """Return whether torch itself would run ``func`` as other operators.

    Decompositions written in Python for the compiler do not count: the device has a kernel of its own there.
    """
    if not isinstance(func, OpOverload) or func.namespace == "prim":
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's arguments or result: a value, or lists, tuples and dicts of such."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))
