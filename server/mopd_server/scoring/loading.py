"""Settings -> a ``TeacherService`` with its model in memory."""

import importlib.util
import logging

import torch

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_server.engines.base import AsyncEngine, Engine
from mopd_server.engines.transformers import load_transformers_engine
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenization import RequestTokenizer
from mopd_server.scoring.tokenizer_loading import load_tokenizer
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)


def load_service(settings: TeacherSettings) -> TeacherService:
    """The teacher that ``settings`` describe, not yet warmed up.

    The tokenizer is loaded and checked first: it takes a moment, the model may take minutes.

    Raises:
        MopdError: one sentence about what is wrong with the model, its tokenizer or a setting.
    """
    tokenizer = RequestTokenizer(load_tokenizer(settings))
    return TeacherService(tokenizer, load_engine(settings, tokenizer.table), settings)


def load_engine(settings: TeacherSettings, table: TokenTable) -> Engine | AsyncEngine:
    """The engine that the settings name, with the model in it.

    Raises:
        MopdError: when it cannot be had, or cannot run the model.
    """
    if settings.engine == "transformers" or (
        settings.engine == "auto" and not _vllm_fits(settings)
    ):
        _require_nothing_of_vllm(settings)
        return load_transformers_engine(settings, table)
    prepare_environment()
    try:
        from mopd_server.engines.vllm.engine import load_vllm_engine
    except ImportError as error:
        raise ConfigError(
            f"--engine vllm needs vLLM, which cannot be imported here ({error}); install "
            "mopd[vllm], or take --engine transformers"
        ) from error
    return load_vllm_engine(settings, table)


def _require_nothing_of_vllm(settings: TeacherSettings) -> None:
    for option, asked in (
        ("--tensor-parallel-size", settings.tensor_parallel_size > 1),
        ("--pipeline-parallel-size", settings.pipeline_parallel_size > 1),
        ("--data-parallel-size", settings.data_parallel_size > 1),
        ("--quantization", settings.quantization is not None),
    ):
        if asked:
            raise ConfigError(
                f"{option} is only for the vLLM engine, and the engine here is transformers "
                f"(--engine {settings.engine}); leave it out, or take --engine vllm"
            )


def _vllm_fits(settings: TeacherSettings) -> bool:
    """Whether vLLM is installed, for an accelerator that is here and meant.

    On a CPU it takes long to start, and offers neither temperatures nor chosen candidates.
    """
    if importlib.util.find_spec("vllm") is None or not torch.accelerator.is_available():
        return False
    prepare_environment()
    try:
        from mopd_server.engines.vllm.engine import accelerates
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or driver
        logger.warning("vLLM is installed and cannot be imported, so it is not used: %s", error)
        return False
    return accelerates(settings.device)
