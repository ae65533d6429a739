"""Values of a model's configuration (``config.json``), read tolerantly.

Families name values differently, published files contain ``null`` where a family has no such value,
and the values of a multimodal model's language model are in a nested configuration.
"""

import math
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from mopd_protocol.errors import ConfigError, MopdError, first_line

#: Names of the longest sequence, as vLLM looks them up.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

#: Names of probabilities of random changes in training (``resid_pdrop``, ``router_jitter_noise``).
NOISE = re.compile("drop|jitter")
#: Of classifiers.
_UNUSED_NOISE = re.compile("classif|summary|path")


def text_config(config: Any) -> Any:
    """Return the configuration of the language model, which is nested in a multimodal one."""
    nested = getattr(config, "get_text_config", None)
    return config if nested is None else nested()


def max_positions(config: Any) -> int | None:
    """Return the most tokens of a sequence; None without a limit."""
    limits = (_number(text_config(config), name) for name in _POSITIONS)
    return next((int(limit) for limit in limits if limit is not None and limit > 0), None)


def vocabulary_size(config: Any) -> int | None:
    """Return the rows of embedding and head; None if the configuration does not contain it."""
    size = _number(text_config(config), "vocab_size")
    return None if size is None else int(size)


def logit_scale(config: Any) -> float:
    """Return the factor of the head's output; 1 for families without one."""
    text = text_config(config)
    return (_number(text, "logit_scale") or 1.0) / (_number(text, "logits_scaling") or 1.0)


def logit_soft_cap(config: Any) -> float | None:
    """Return c of ``c * tanh(logits / c)``; None without a cap."""
    return _number(text_config(config), "final_logit_softcapping") or None


def ties_head(config: Any) -> bool:
    """Return True if the head is the embedding."""
    return any(
        bool(getattr(each, "tie_word_embeddings", None)) for each in (config, text_config(config))
    )


def stored_dtype(config: Any) -> Any:
    """Return the precision of the published weights, a torch dtype or its name; None if unknown."""
    own = getattr(config, "dtype", None)
    return getattr(text_config(config), "dtype", None) if own is None else own


def is_quantized(config: Any) -> bool:
    """Return True if the weights are quantized.

    Args:
        config: a configuration of transformers, or the values of a ``config.json``.
    """
    if isinstance(config, Mapping):
        return bool(config.get("quantization_config"))  # pyright: ignore[reportUnknownMemberType]
    return bool(getattr(config, "quantization_config", None))


def dropout_values(config: Any) -> dict[str, float]:
    """Return name -> value of the probabilities above 0 with which training changes activations."""
    numbers = {name: _number(text_config(config), name) for name in vars(text_config(config))}
    return {
        name: value
        for name, value in sorted(numbers.items())
        if value and NOISE.search(name) and not _UNUSED_NOISE.search(name)
    }


@contextmanager
def explaining_config(subject: str, key: str, config: Any = None) -> Generator[None]:
    """Raise ConfigError in place of the errors of transformers for a model that it cannot run.

    Args:
        subject: start of the message.
        config: of a loaded model; only errors that its null values may have caused are replaced.

    Raises:
        ConfigError: in place of other errors than those of mopd.
    """
    try:
        yield
    except MopdError:
        raise
    except Exception as error:  # a failed validation derives from Exception only
        nulls = [] if config is None else _unset_values(text_config(config))
        if config is not None and not nulls:
            raise
        fix = f". Set {', '.join(nulls)} in its config.json (found null)." if nulls else ""
        raise ConfigError(f"{subject}: {first_line(error)}{fix}", key=key) from error


def _unset_values(text: Any) -> list[str]:
    """Return the names of values that are null, of those that have a default in their family."""
    unset = (name for name, value in text.to_dict().items() if value is None)
    return [
        name
        for name in unset
        if getattr(type(text), name, None) is not None and not name.endswith("_token_id")
    ]


def _number(config: Any, name: str) -> float | None:
    """Return a finite number of a configuration; None for null, text and missing values."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
