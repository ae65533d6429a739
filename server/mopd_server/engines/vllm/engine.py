"""``VllmEngine``: scores with vLLM in this process, through its ``AsyncLLM``.

vLLM reads prompt and completion as one prompt, gives the log-probabilities of what it read, and
batches whatever is in flight at every step. It runs in an event loop of its own, in a thread, so
that its bookkeeping does not hold up the HTTP server and any event loop may ask it.

The only file of the server that imports vllm.
"""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from itertools import count
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensInput
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from mopd_protocol.errors import ConfigError, MopdError
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    EngineDead,
    EngineDescription,
    EngineTimes,
    ScoringTask,
    no_rows,
)
from mopd_server.engines.vllm.flat_logprobs import (
    PromptArrays,
    padded_rows,
    topk_of_arrays,
    topk_of_flat,
    truncated,
)
from mopd_server.engines.vllm.memory import VllmLimits, derive_limits, describe
from mopd_server.engines.vllm.worker_extension import ScoringWorkerExtension
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: vLLM imports the extension by name, in its worker processes.
_WORKER_EXTENSION = f"{ScoringWorkerExtension.__module__}.{ScoringWorkerExtension.__qualname__}"

#: Seconds between vLLM's word that its engine is dead and the end of the process.
_EXIT_GRACE_SECONDS = 10.0

#: For the status of a process that has ended, and between two looks at it.
_STATUS_SECONDS = 5.0
_STATUS_PAUSE_SECONDS = 0.01

#: For what is in flight, when a signal that should end the server reaches vLLM's processes too.
_DRAIN_SECONDS = 60


def accelerates(device: str) -> bool:
    """Whether the installed vLLM has found an accelerator, and ``device`` asks for no other."""
    if current_platform.is_cpu() or current_platform.is_unspecified():
        return False
    return _takes(device)


def load_vllm_engine(settings: TeacherSettings, table: TokenTable) -> "VllmEngine":
    """The engine for a model folder or hub id, its processes started.

    Raises:
        ConfigError: when vLLM cannot load the model, or not under these settings.
        DataError: when the head is narrower than the tokenizer.
    """
    _require_device(settings.device)
    try:
        model = AsyncEngineArgs(**_model_arguments(settings)).create_model_config()
        real_ids = table.real_ids(model.get_vocab_size())
        limits = _limits(settings, model)
        logger.info("%s", describe(limits, settings))
        return VllmEngine(
            AsyncEngineArgs(**_model_arguments(settings), **_size_arguments(settings, limits)),
            real_ids,
            _description(settings, model, limits),
        )
    except MopdError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"vLLM cannot load model {settings.model!r}: {_first_line(error)}; its log above says "
            "more, and --engine transformers may do"
        ) from error


class VllmEngine(AsyncEngine):
    """An ``AsyncEngine`` around vLLM's engine processes, which it starts and ends.

    Args:
        arguments: what vLLM is started with; ``_size_arguments`` says which of it scoring needs.
        real_ids: ``[head rows]``, False for rows that belong to no token.
        description: what the manifest will say; whether candidates can be scored is tried out.
    """

    def __init__(
        self,
        arguments: AsyncEngineArgs,
        real_ids: NDArray[np.bool_],
        description: EngineDescription,
    ) -> None:
        self._real_ids = real_ids
        self._requests = count()
        self._closed = False
        self._death: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        _keep_arrays()
        strangers = set(active_children())
        self._llm = self._call(_started(arguments))
        try:
            self._watch_processes([child for child in active_children() if child not in strangers])
            self._extend_workers()
            candidates = self._call(self._scores_candidates())
        except BaseException:
            self.close()
            raise
        self._description = replace(description, candidate_ids=candidates)

    @property
    def description(self) -> EngineDescription:
        """Who this engine is."""
        return self._description

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """See ``AsyncEngine.score``; ``temperature`` is 1, as the description offers no other."""
        if temperature != 1.0:
            raise ValueError(f"found temperature {temperature}; vLLM scores prompts only at 1.0")
        if not len(task.completion_ids):
            return no_rows(0 if task.candidate_ids else top_k), EngineTimes(0.0, 0.0)
        scoring = self._score(task, top_k)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scoring, self._loop))

    def watch(self, on_death: Callable[[str], None]) -> None:
        """See ``AsyncEngine.watch``."""
        self._death.add_done_callback(lambda death: on_death(death.result()))

    def close(self) -> None:
        """Ends vLLM's processes and the thread that talks to them."""
        if self._closed:
            return
        self._closed = True
        self._llm.shutdown()
        del self._llm  # its destructor must not run when the interpreter is half gone
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs it in the engine's event loop, from a thread that may wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _extend_workers(self) -> None:
        padding = np.flatnonzero(~self._real_ids).tolist()
        if padding:
            self._call(
                self._llm.collective_rpc(ScoringWorkerExtension.mask_head.__name__, args=(padding,))
            )
        self._call(
            self._llm.collective_rpc(ScoringWorkerExtension.end_with.__name__, args=(os.getpid(),))
        )

    async def _scores_candidates(self) -> bool:
        """Whether this vLLM, on this platform, scores ids that the caller chooses."""
        if "prompt_logprob_token_ids" not in SamplingParams.__struct_fields__:
            return False
        token = np.flatnonzero(self._real_ids)[:1].astype(np.int32)
        try:
            await self._score_candidates(ScoringTask(token, token, (token,)), (token,))
        except EngineDead:
            raise
        except Exception as error:  # whatever refuses it, it is not offered
            logger.info("candidate_ids are not offered: %s", _first_line(error))
            return False
        return True

    async def _score(self, task: ScoringTask, top_k: int) -> tuple[TopKLogprobs, EngineTimes]:
        if task.candidate_ids is not None:
            return await self._score_candidates(task, task.candidate_ids)
        output = await self._read(task, prompt_logprobs=top_k, flat_logprobs=True)
        scores = _topk(
            output.prompt_logprobs,
            task.completion_ids,
            top_k=top_k,
            real_ids=int(self._real_ids.sum()),
        )
        self._require_real(scores)
        return scores, _times(output)

    async def _score_candidates(
        self, task: ScoringTask, candidates: tuple[NDArray[np.int32], ...]
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """The token that is there stands before its row's candidates, to be scored with them."""
        ids = padded_rows(candidates, max(map(len, candidates)))
        output = await self._read(
            task,
            prompt_logprob_token_ids=np.column_stack([task.completion_ids, ids]),
            # vLLM counts from the position that predicts, one before the predicted token.
            prompt_logprob_start=len(task.prompt_ids) - 1,
        )
        found = np.asarray(output.prompt_token_id_logprobs, dtype=np.float32)
        if found.shape != (len(ids), 1 + ids.shape[1]):
            raise RuntimeError(f"vLLM scored candidates of shape {found.shape}, not {ids.shape}")
        scores = truncated(
            ids,
            found[:, 1:],
            task.completion_ids,
            found[:, 0],
            real_ids=int(self._real_ids.sum()),
        )
        return scores, _times(output)

    async def _read(self, task: ScoringTask, **asked: Any) -> RequestOutput:
        """What vLLM says about prompt and completion; in the engine's event loop."""
        ids = np.concatenate([task.prompt_ids, task.completion_ids]).tolist()
        prompt = TokensInput(type="token", prompt_token_ids=ids)
        sampling = SamplingParams(
            max_tokens=1,  # it cannot write nothing
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **asked,
        )
        request = f"sequence-{next(self._requests)}"
        final: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, sampling, request):
                final = output
        except EngineDeadError as error:
            raise EngineDead(await self._cause_of_death()) from error
        if final is None:
            raise RuntimeError("vLLM ended a sequence without an output")
        if final.outputs[0].finish_reason == "abort":  # by vLLM: ours are never read to the end
            raise EngineDead("vLLM is being ended, and takes no more sequences")
        return final

    def _require_real(self, scores: TopKLogprobs) -> None:
        kept = scores.ids[scores.ids >= 0]
        if not self._real_ids[kept].all():
            raise RuntimeError(
                "vLLM gave probability to ids without a token: its head is not masked"
            )

    def _watch_processes(self, processes: list[BaseProcess]) -> None:
        if not processes:  # they run elsewhere (Ray): the next request finds them dead
            return

        def watch() -> None:
            ended = wait([process.sentinel for process in processes])
            self._die(_end_of([each for each in processes if each.sentinel in ended]))

        threading.Thread(target=watch, name="vllm-watch", daemon=True).start()

    def _die(self, cause: str) -> None:
        if not self._closed:
            with suppress(InvalidStateError):  # the first cause is the one that counts
                self._death.set_result(cause)

    async def _cause_of_death(self) -> str:
        """What the end of the process says, as soon as it is over."""
        told = asyncio.shield(asyncio.wrap_future(self._death))
        try:
            return await asyncio.wait_for(told, _EXIT_GRACE_SECONDS)
        except TimeoutError:
            self._die("the vLLM engine has died; its log says why")
            return "the vLLM engine has died; its log says why"


def _keep_arrays() -> None:
    """Has vLLM leave prompt log-probabilities in the arrays that its engine process sends.

    By itself it makes a Python object of every candidate, which takes longer than computing them.
    This reaches into vLLM: where it does not look as it did, its lists are read instead.
    """
    update = getattr(LogprobsProcessor, "_update_prompt_logprobs", None)
    if update is None or len(signature(update).parameters) != 2:
        logger.warning("this vLLM is unknown here: its lists are read, which is slower")
        return

    def keep(self: LogprobsProcessor, prompt_logprobs_tensors: LogprobsTensors) -> None:
        ids = prompt_logprobs_tensors.logprob_token_ids.numpy()
        logprobs = prompt_logprobs_tensors.logprobs.numpy()
        before: Any = self.prompt_logprobs
        if isinstance(before, PromptArrays):  # an engine that sends a long prompt in parts
            ids = np.concatenate([before.token_ids, ids])
            logprobs = np.concatenate([before.logprobs, logprobs])
        vars(self)["prompt_logprobs"] = PromptArrays(ids, logprobs)

    vars(keep)["arrays"] = True
    if "arrays" not in vars(update):
        LogprobsProcessor._update_prompt_logprobs = keep  # pyright: ignore[reportPrivateUsage]


def _topk(
    found: object, completion_ids: NDArray[np.int32], *, top_k: int, real_ids: int
) -> TopKLogprobs:
    if isinstance(found, PromptArrays):
        return topk_of_arrays(found, completion_ids, top_k=top_k, real_ids=real_ids)
    if isinstance(found, FlatLogprobs):
        return topk_of_flat(found, completion_ids, top_k=top_k, real_ids=real_ids)
    raise RuntimeError(f"vLLM was asked for flat log-probabilities and gave {type(found).__name__}")


async def _started(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def _end_of(ended: list[BaseProcess]) -> str:
    for process in ended:
        code = _status_of(process)
        if code is not None and code < 0:
            return f"the vLLM process {process.name} was ended by {signal.Signals(-code).name}"
        if code is not None:
            return f"the vLLM process {process.name} ended with status {code}; its log says why"
    return "a vLLM process has ended; its log says why"


def _status_of(ended: BaseProcess) -> int | None:
    """What it ended with. vLLM waits for its processes too: whichever thread comes second finds no
    such child, and knows nothing before the first has noted the status."""
    for _ in range(round(_STATUS_SECONDS / _STATUS_PAUSE_SECONDS)):
        if (code := ended.exitcode) is not None:
            return code
        time.sleep(_STATUS_PAUSE_SECONDS)
    return None


def _times(output: RequestOutput) -> EngineTimes:
    """From vLLM's own clock."""
    stats = output.metrics
    if stats is None:
        return EngineTimes(float("nan"), float("nan"))
    return EngineTimes(
        stats.scheduled_ts - stats.queued_ts, stats.first_token_ts - stats.scheduled_ts
    )


def _model_arguments(settings: TeacherSettings) -> dict[str, Any]:
    dtype = "float32" if settings.dtype == "auto" and current_platform.is_cpu() else settings.dtype
    return {
        "model": settings.model,
        "revision": settings.revision,
        "dtype": dtype,
        "quantization": settings.quantization,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,  # it reads ids and writes ids
        "generation_config": "vllm",  # the model's own only speaks of sampling
    }


def _size_arguments(settings: TeacherSettings, limits: VllmLimits) -> dict[str, Any]:
    memory = limits.gpu_memory_utilization
    return {
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_logprobs": limits.max_logprobs,
        "enable_chunked_prefill": True,  # a sequence may be longer than a step
        # vLLM does not read cached prefixes for prompts whose log-probabilities are asked for.
        "enable_prefix_caching": False,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "data_parallel_size": settings.data_parallel_size,
        "worker_extension_cls": _WORKER_EXTENSION,
        # Compiling pays where a step is short next to its launches, which on a CPU it is not.
        "enforce_eager": current_platform.is_cpu(),
        "disable_log_stats": False,  # they hold the times of each sequence
        "shutdown_timeout": _DRAIN_SECONDS,
        **({} if memory is None else {"gpu_memory_utilization": memory}),
    }


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
    settings: TeacherSettings, model: ModelConfig, limits: VllmLimits
) -> EngineDescription:
    # torch and quantization decide how numbers are rounded, so they decide the scores.
    built_with = [f"torch {torch.__version__}"]
    if model.quantization:
        built_with.append(f"{model.quantization} weights")
    return EngineDescription(
        engine="vllm",
        engine_version=f"{vllm.__version__} ({', '.join(built_with)})",
        model=name_of(settings.model),
        revision=revision_of(settings.model, model.hf_config, asked=settings.revision),
        dtype=str(model.dtype).removeprefix("torch."),
        logit_width=model.get_vocab_size(),
        max_model_len=limits.longest_sequence,
        candidate_ids=False,
        temperature=False,  # prompt log-probabilities are computed without it
    )


def _takes(device: str) -> bool:
    return device in ("auto", current_platform.device_type)


def _require_device(device: str) -> None:
    if not _takes(device):
        found = current_platform.device_type
        raise ConfigError(
            f"device {device!r}: this vLLM runs on {found!r} and takes all of what it sees; "
            f"expected auto or {found} (CUDA_VISIBLE_DEVICES chooses among several)"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
