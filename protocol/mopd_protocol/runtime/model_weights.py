"""Completeness of loaded weights: transformers initializes missing tensors at random and ignores
unexpected ones, so that an incomplete checkpoint, or a classifier, would load as a model."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mopd_protocol.errors import WeightsError
from mopd_protocol.runtime.checkpoint_files import require_consistent_files
from mopd_protocol.runtime.model_config import is_quantized, ties_head

#: Tensors that older releases stored and newer ones compute: rotary frequencies, positions, causal
#: masks; and scales of a quantized key-value cache.
_DERIVED = re.compile(
    r"(rotary_emb\.inv_freq|(^|\.)position_ids|(attn|attention)\.(masked_)?bias|\.[kv]_scale)$"
)

#: Names per kind of problem in a message.
_QUOTED = 3


def load_complete(
    subject: str,
    from_pretrained: Callable[..., Any],
    model: str | Path,
    *,
    all_values: bool = True,
    **options: Any,
) -> Any:
    """Load a model with transformers, all of its weights from the checkpoint.

    Args:
        subject: start of the error message.
        from_pretrained: of a model class; called with ``model`` and ``options``.
        model: folder or hub id.
        all_values: look for NaN in all weights instead of embedding and head only, which the
            self-check of a service may not reach; files are then read completely.
        options: further arguments.

    Raises:
        WeightsError: if tensors are missing, unexpected, stored twice, of another shape, or not
            finite. Tied heads and tensors that a model computes itself are understood.
    """
    folder = Path(model)
    if folder.is_dir():
        require_consistent_files(subject, folder, quantized=_is_quantized(folder))
    loaded, info = from_pretrained(
        model, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    require_complete(subject, type(loaded).__name__, info)
    _require_tied(subject, loaded)
    _require_values(subject, loaded, all_values=all_values)
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


def _is_quantized(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported by the loader
        return True
    return not isinstance(config, dict) or is_quantized(config)


def _ends(model: Any) -> dict[str, Any]:
    """Return the weights of embedding and head, as far as the model has them."""
    getters = {
        "embedding": getattr(model, "get_input_embeddings", None),
        "head": getattr(model, "get_output_embeddings", None),
    }
    layers = {name: getter() for name, getter in getters.items() if getter is not None}
    weights = {name: getattr(layer, "weight", None) for name, layer in layers.items()}
    return {name: weight for name, weight in weights.items() if weight is not None}


def _require_tied(subject: str, model: Any) -> None:
    """Check that a tied head is the embedding: of two stored ones, engines use different ones."""
    ends = _ends(model)
    tied = ties_head(getattr(model, "config", None))
    supported = getattr(model, "_tied_weights_keys", None)
    if tied and supported and len(ends) == 2 and ends["head"] is not ends["embedding"]:
        raise WeightsError(
            f"{subject}: config.json ties the head to the embedding, but the weights have another "
            "head (found two different tensors, expected one). Set tie_word_embeddings to false in "
            "config.json if the head was trained, else save the model again.",
            key="tie_word_embeddings",
        )


def _require_values(subject: str, model: Any, *, all_values: bool) -> None:
    """Check that weights are finite, and those of embedding and head not all equal."""
    ends = _ends(model)
    parameters = model.named_parameters() if all_values else ends.items()
    for name, weight in parameters:
        if not _has_values(weight):
            continue
        lowest, highest = (float(value) for value in weight.detach().aminmax())
        if not math.isfinite(lowest) or not math.isfinite(highest):
            raise WeightsError(
                f"{subject}: weights of {name} are not finite (found values from {lowest:g} to "
                f"{highest:g}, expected finite numbers). Download or save the model again, or load "
                "it in another precision.",
                key=name,
            )
        if lowest == highest and any(weight is end for end in ends.values()):
            raise WeightsError(
                f"{subject}: all weights of {name} are {lowest:g}, as in a file that was not "
                "written completely (expected different values). Download or save the model again.",
                key=name,
            )


def _has_values(weight: Any) -> bool:
    """Return whether a minimum is defined: not of quantized, empty and unallocated tensors."""
    sizes = weight.is_floating_point() and weight.element_size() > 1 and weight.numel() > 0
    return bool(sizes) and not weight.is_meta


def _stored(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not _DERIVED.search(name))


def _quoted(names: list[str]) -> str:
    rest = f" and {len(names) - _QUOTED} more" if len(names) > _QUOTED else ""
    return ", ".join(names[:_QUOTED]) + rest
