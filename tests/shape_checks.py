"""The checker of the losses' shape annotations; ``tests/conftest.py`` turns it on."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, refusing tensors of other shapes or types than it says.

    Other annotations are pyright's business: checking them again would forbid stand-ins.

    Args:
        function: a copy that jaxtyping has made to be checked.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_has_shape(inner) for inner in get_args(hint))
