"""Availability and loading of vLLM, which is imported on use: the import takes seconds."""

import importlib.util
import logging

import torch

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_server.engines.base import AsyncEngine
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)


def is_available(settings: TeacherSettings) -> bool:
    """Return whether vLLM is installed with an accelerator that the settings allow.

    On a CPU, vLLM starts slowly and supports neither temperatures nor candidates.
    """
    if importlib.util.find_spec("vllm") is None or not torch.accelerator.is_available():
        return False
    prepare_environment()
    try:
        from mopd_server.engines.vllm.startup import supports_device
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or driver
        logger.warning("vLLM is installed, but its import failed; not selected: %s", error)
        return False
    return supports_device(settings.device)


def load_engine(settings: TeacherSettings, table: TokenTable) -> AsyncEngine:
    """Load the engine for a model folder or hub id, and start its processes.

    Raises:
        ConfigError: if vLLM is not installed, or cannot load the model with these settings.
        DataError: if the head is narrower than the tokenizer.
    """
    prepare_environment()
    try:
        from mopd_server.engines.vllm.startup import start_engine
    except ImportError as error:
        raise ConfigError(
            f"--engine vllm: importing vLLM failed: {error}. Run pip install '.[vllm]', or pass "
            "--engine transformers.",
            key="engine",
        ) from error
    return start_engine(settings, table)
