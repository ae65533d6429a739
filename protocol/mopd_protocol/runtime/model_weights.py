"""Completeness of loaded weights: transformers initializes missing tensors at random and ignores
unexpected ones, so that an incomplete checkpoint, or a classifier, would load as a model."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mopd_protocol.errors import WeightsError

#: Tensors that older releases stored and newer ones compute: rotary frequencies, positions, causal
#: masks; and scales of a quantized key-value cache.
_DERIVED = re.compile(
    r"(rotary_emb\.inv_freq|(^|\.)position_ids|(attn|attention)\.(masked_)?bias|\.[kv]_scale)$"
)

#: Names per kind of problem in a message.
_QUOTED = 3


def load_complete(
    subject: str, from_pretrained: Callable[..., Any], model: str | Path, **options: Any
) -> Any:
    """Load a model with transformers, all of its weights from the checkpoint.

    Args:
        subject: start of the error message.
        from_pretrained: of a model class; called with ``model`` and ``options``.
        model: folder or hub id.
        options: further arguments.

    Raises:
        WeightsError: if tensors are missing, unexpected, or of another shape. Tied heads and
            tensors that a model computes itself are understood.
    """
    loaded, info = from_pretrained(
        model, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    require_complete(subject, type(loaded).__name__, info)
    return loaded


def require_complete(subject: str, architecture: str, info: Mapping[str, Any]) -> None:
    """Check the ``loading_info`` of transformers.

    Raises:
        WeightsError: see ``load_complete``; ``key`` is the first tensor.
    """
    missing = _stored(info["missing_keys"])
    unexpected = _stored(info["unexpected_keys"])
    shapes = {name: pair for name, *pair in info["mismatched_keys"]}
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": [
            f"{name} {list(stored)} instead of {list(expected)}"
            for name, (stored, expected) in sorted(shapes.items())
        ],
    }
    listed = "; ".join(f"{kind}: {_quoted(names)}" for kind, names in problems.items() if names)
    if listed:
        raise WeightsError(
            f"{subject}: the weights are not those of a complete {architecture} (found {listed}, "
            "expected all tensors of the model and no others). Download or save the model again; "
            "a classifier or reward model has no language-model head.",
            key=[*missing, *unexpected, *sorted(shapes)][0],
        )


def _stored(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not _DERIVED.search(name))


def _quoted(names: list[str]) -> str:
    rest = f" and {len(names) - _QUOTED} more" if len(names) > _QUOTED else ""
    return ", ".join(names[:_QUOTED]) + rest
