"""Start of the vLLM engine: settings -> vLLM's arguments -> ``VllmEngine``."""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import logging
from collections.abc import Sequence
from types import FunctionType
from typing import Any, get_args

import torch
import vllm
from vllm.config import ModelConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from mopd_protocol.errors import ConfigError, DataError, first_line
from mopd_protocol.runtime.host_memory import cpu_cache_bytes
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_server.engines.adapters import Adapter, load_adapters
from mopd_server.engines.base import EngineDescription
from mopd_server.engines.vllm.arguments import parse_arguments
from mopd_server.engines.vllm.checkpoint import require_complete_checkpoint
from mopd_server.engines.vllm.engine import VllmEngine
from mopd_server.engines.vllm.memory import VllmLimits, derive_limits, describe
from mopd_server.engines.vllm.prefix_cache import create_scheduler
from mopd_server.engines.vllm.worker_extension import ScoringWorkerExtension
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)

#: Seconds for sequences in flight if a signal to the server also reaches vLLM's processes.
_DRAIN_SECONDS = 60


def supports_device(device: str) -> bool:
    """Return whether the installed vLLM runs on an accelerator, and ``device`` allows that one."""
    if current_platform.is_cpu() or current_platform.is_unspecified():
        return False
    return _is_own_device(device)


def start_engine(settings: TeacherSettings, table: TokenTable) -> VllmEngine:
    """Start the engine for a model folder or hub id.

    Raises:
        ConfigError: if vLLM cannot load the model with these settings.
        WeightsError: if the weights are incomplete, or not those of a causal language model.
        DataError: if the head is narrower than the tokenizer.
    """
    _require_device(settings.device)
    extra = parse_arguments(settings.vllm_arg)
    adapters = load_adapters(settings.adapter)
    require_complete_checkpoint(settings)
    try:
        model_arguments = _model_arguments(settings) | extra
        model = AsyncEngineArgs(**model_arguments).create_model_config()
        real_ids = table.real_ids(model.get_vocab_size())
        limits = _limits(settings, model)
        logger.info("%s", describe(limits, settings))
        return VllmEngine(
            AsyncEngineArgs(
                **_size_arguments(settings, limits) | _lora_arguments(adapters) | model_arguments
            ),
            real_ids,
            _description(settings, model, limits, adapters),
        )
    except (ConfigError, DataError):
        raise
    except Exception as error:  # of transformers and vLLM, with any base class
        raise ConfigError(
            f"model {settings.model!r}: vLLM cannot load the model: {first_line(error)}. See its "
            "log above, or try --engine transformers.",
            key="model",
        ) from error


def _model_arguments(settings: TeacherSettings) -> dict[str, Any]:
    dtype = "float32" if settings.dtype == "auto" and current_platform.is_cpu() else settings.dtype
    return {
        "model": settings.model,
        "revision": settings.revision,
        "dtype": dtype,
        "quantization": settings.quantization,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # the model's own concerns sampling only
    }


def _size_arguments(settings: TeacherSettings, limits: VllmLimits) -> dict[str, Any]:
    memory = limits.gpu_memory_utilization
    suspends = settings.pool_resident > 0 and current_platform.is_sleep_mode_available()
    return {
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_logprobs": limits.max_logprobs,
        "enable_chunked_prefill": True,  # a sequence may be longer than a step
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "worker_extension_cls": _name(ScoringWorkerExtension),
        "scheduler_cls": _name(create_scheduler),
        # Compiling pays off where a step is short compared to its launches: not on a CPU.
        "enforce_eager": current_platform.is_cpu(),
        "enable_sleep_mode": suspends,
        "disable_log_stats": False,  # source of the times of each sequence
        "shutdown_timeout": _DRAIN_SECONDS,
        # VLLM_CPU_KVCACHE_SPACE, in GiB, overrides this size.
        **(
            {"kv_cache_memory_bytes": cpu_cache_bytes(max(settings.pool_resident, 1))}
            if memory is None
            else {"gpu_memory_utilization": memory}
        ),
    }


def _lora_arguments(adapters: Sequence[Adapter]) -> dict[str, Any]:
    if not adapters:
        return {}
    for adapter in adapters:
        if adapter.adapts_head:
            raise ConfigError(
                f"--adapter: not supported by vLLM: {adapter.name!r} changes the embeddings or the "
                "head (expected linear layers only). Pass --engine transformers.",
                key="adapter",
            )
    highest = max(adapter.rank for adapter in adapters)
    rank = next((rank for rank in get_args(MaxLoRARanks) if rank >= highest), highest)
    # All on the device: any of them may be in any step. On a CPU, vLLM applies the last of the
    # adapters to tokens without one, so that one more, of zeros, is needed.
    places = len(adapters) + current_platform.is_cpu()
    return {"enable_lora": True, "max_loras": places, "max_lora_rank": rank}


def _name(imported: type | FunctionType) -> str:
    """Return the name by which vLLM's processes import this."""
    return f"{imported.__module__}.{imported.__qualname__}"


def _limits(settings: TeacherSettings, model: ModelConfig) -> VllmLimits:
    on_cpu = current_platform.is_cpu()
    return derive_limits(
        settings,
        logit_width=model.get_vocab_size(),
        logit_bytes=model.dtype.itemsize,
        model_positions=model.max_model_len,
        accelerator_bytes=None if on_cpu else current_platform.get_device_total_memory(),
    )


def _description(
    settings: TeacherSettings,
    model: ModelConfig,
    limits: VllmLimits,
    adapters: tuple[Adapter, ...],
) -> EngineDescription:
    # torch and quantization decide how numbers are rounded, and so affect the scores.
    build = [f"torch {torch.__version__}"]
    if model.quantization:
        build.append(f"{model.quantization} weights")
    build += sorted(settings.vllm_arg)
    return EngineDescription(
        engine="vllm",
        engine_version=f"{vllm.__version__} ({', '.join(build)})",
        model=name_of(settings.model),
        revision=revision_of(settings.model, model.hf_config, requested=settings.revision),
        dtype=str(model.dtype).removeprefix("torch."),
        logit_width=model.get_vocab_size(),
        max_model_len=limits.longest_sequence,
        candidate_ids=False,
        temperature=False,
        adapters=adapters,
    )


def _is_own_device(device: str) -> bool:
    return device in ("auto", current_platform.device_type)


def _require_device(device: str) -> None:
    if not _is_own_device(device):
        own = current_platform.device_type
        raise ConfigError(
            f"--device: not supported by this vLLM, which uses all visible devices (found "
            f"{device!r}, expected auto or {own}). Select devices with CUDA_VISIBLE_DEVICES.",
            key="device",
        )
