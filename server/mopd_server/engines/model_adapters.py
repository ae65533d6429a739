"""LoRA adapters in a model of transformers: loaded next to each other, one active at a time."""

import logging
import warnings
from collections.abc import Sequence

import transformers
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from mopd_protocol.errors import ConfigError, first_line
from mopd_protocol.runtime.model_weights import require_complete
from mopd_server.engines.adapters import Adapter

logger = logging.getLogger(__name__)


class ModelAdapters:
    """Adapters of one model, which is changed; without any, the model is left unchanged.

    Raises:
        ConfigError: if peft is not installed, or too old for the installed transformers, or if an
            adapter does not fit the model.
        WeightsError: if tensors of an adapter are missing or unexpected.
    """

    def __init__(self, model: PreTrainedModel, adapters: Sequence[Adapter]) -> None:
        self._model = model
        # peft permits no dots in names, and transformers reports the tensors of all adapters.
        self._names = {adapter.name: f"adapter{index}_" for index, adapter in enumerate(adapters)}
        self._active: str | None = None
        if adapters:
            _require_peft()
        for adapter in adapters:
            self._load(adapter)
        if adapters:
            model.disable_adapters()
            model.eval()

    def activate(self, name: str | None) -> None:
        """Use an adapter in later calls of the model; None: the base model."""
        if name == self._active:
            return
        if name is None:
            self._model.disable_adapters()
        else:
            self._model.enable_adapters()
            self._model.set_adapter(self._names[name])
        self._active = name

    def _load(self, adapter: Adapter) -> None:
        own = self._names[adapter.name]
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it reports the tensors of other adapters
        try:
            # Several adapters are intended.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            info = self._model.load_adapter(str(adapter.folder), adapter_name=own)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise ConfigError(
                f"--adapter: loading {adapter.name!r} from {str(adapter.folder)!r} failed: "
                f"{first_line(error)} (expected an adapter of this model)",
                key="adapter",
            ) from error
        finally:
            transformers.logging.set_verbosity(verbosity)
        require_complete(
            f"adapter {adapter.name!r}",
            "LoRA adapter",
            {
                "missing_keys": [key for key in info.missing_keys if own in key],
                "unexpected_keys": info.unexpected_keys,
                "mismatched_keys": info.mismatched_keys,
            },
        )
        logger.info("loaded adapter %r from %s", adapter.name, adapter.folder)


def _require_peft() -> None:
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        message = (
            f"--adapter: peft not found, or too old (expected at least {MIN_PEFT_VERSION}, as "
            "transformers requires). Run pip install '.[lora]'."
        )
        raise ConfigError(message, key="adapter") from error
