"""Training mode of the student's model: gradient checkpointing, and no dropout.

A teacher scores without dropout. A student that is trained with it is compared as another model
than the one that sampled: even a student that is its own teacher has a loss.
"""

import warnings
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.model_config import NOISE

#: Part of the names of peft's modules, whose dropout is a separate setting.
_ADAPTER = "lora_dropout"


def remove_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability of a model to zero; adapters and ``model.config`` keep theirs.

    Modules read probabilities from their attributes or from the configuration, so that all but the
    model itself, which saves its configuration, receive a copy of that.
    """
    copies: dict[int, Any] = {}
    for name, module in model.named_modules():
        if module is model or _ADAPTER in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            module.p = 0.0
        _remove(vars(module))
        config = vars(module).get("config")
        if config is not None:
            copied = copies.setdefault(id(config), deepcopy(config))
            _remove_everywhere(copied)
            module.config = copied


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute layers in the backward pass.

    Raises:
        ConfigError: when the model does not support it.
    """
    try:
        with warnings.catch_warnings():
            # Later releases of transformers 5 deprecate the one name that all releases have.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"student.gradient_checkpointing: not supported by this model: {error}. Set it to "
            "false.",
            key="student.gradient_checkpointing",
        ) from error


def _remove_everywhere(config: Any) -> None:
    """Set the probabilities of a configuration and those nested in it to zero."""
    values = vars(config)
    _remove(values)
    for value in values.values():
        if hasattr(value, "to_dict"):
            _remove_everywhere(value)


def _remove(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if NOISE.search(name) and isinstance(value, float):
            values[name] = 0.0
