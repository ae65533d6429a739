"""Runtime checks of the losses' shape annotations, enabled by ``tests/conftest.py``."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with checks of its tensor annotations (shape and dtype).

    Other annotations are checked by pyright; a runtime check would reject test doubles.

    Args:
        function: the copy that jaxtyping passes to its checker.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(inner) for inner in get_args(hint))
