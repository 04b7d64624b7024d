"""Another ``forward`` for a module while a context lasts, beneath the hooks that other libraries put around it.

Libraries that move weights wrap ``module.forward`` and keep what they wrapped: diffusers in the references of its hook
registry, accelerate as ``_old_forward``. A forward put on top of theirs would run before the weights are there, so
ours takes the place of the module's own, wherever that is held, and the hooks of ``nn.Module`` are called as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from .errors import RequestError

_MISSING: Any = object()


class _Place(NamedTuple):
    """An attribute that holds a forward."""

    attributes: dict[str, Any]
    name: str

    def held(self) -> Any:
        return self.attributes.get(self.name, _MISSING)

    def put(self, value: Any) -> None:
        if value is _MISSING:
            self.attributes.pop(self.name, None)
        else:
            self.attributes[self.name] = value


@contextmanager
def attached(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of ``module`` run ``forward`` in place of its own; everything is as before afterwards.

    Args:
        module: The module.
        forward: Called with what the module is called with; it does not get the module.

    Raises:
        RequestError: The module's own forward is not in use, because someone replaced it.
    """
    place = _place_of_own(module)
    before = place.held()
    place.put(forward)
    try:
        yield
    finally:
        _detach(module, forward, place, before)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, bound, whatever is attached."""
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def _detach(module: nn.Module, forward: Callable[..., Any], place: _Place, before: Any) -> None:
    """Put back what was there; a hook that was added meanwhile and wrapped ours gets the module's own."""
    if place.held() is forward:
        place.put(before)
        return
    for other in _places(module):
        if other.held() is forward:
            other.put(own_forward(module))


def _place_of_own(module: nn.Module) -> _Place:
    """Return the place that holds the module's own forward, the innermost of all hooks."""
    for place in _places(module):
        if _is_own(module, place.held()):
            return place
    if "forward" not in module.__dict__:
        return _Place(module.__dict__, "forward")
    raise RequestError(
        f"another forward is in the place of {type(module).__name__}'s own",
        have=repr(module.__dict__["forward"]),
        remedy="Leave the context, or undo the patch, that put it there.",
    )


def _is_own(module: nn.Module, held: Any) -> bool:
    return getattr(held, "__func__", None) is type(module).forward and held.__self__ is module


def _places(module: nn.Module) -> Iterator[_Place]:
    """Yield every attribute that may hold a forward of ``module``."""
    yield _Place(module.__dict__, "forward")
    yield _Place(module.__dict__, "_old_forward")
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        yield _Place(reference.__dict__, "original_forward")
        yield _Place(reference.__dict__, "forward")
