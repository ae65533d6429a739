"""``VllmEngine``: scores with vLLM's ``AsyncLLM`` in this process.

Prompt and completion are one vLLM prompt; vLLM returns its prompt log-probabilities and batches
all sequences in flight at every step. The engine runs in a separate event loop and thread, so
that its bookkeeping does not delay the HTTP server and any event loop can call the engine.
"""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from itertools import count
from multiprocessing import active_children
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensInput
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    EngineCrashError,
    EngineDescription,
    EngineTimes,
    ScoringTask,
    empty_scores,
    first_line,
)
from mopd_server.engines.vllm.exit_monitor import ExitMonitor
from mopd_server.engines.vllm.flat_logprobs import (
    PromptArrays,
    pad_rows,
    topk_from_arrays,
    topk_from_lists,
    truncate,
)
from mopd_server.engines.vllm.heartbeat import Heartbeat
from mopd_server.engines.vllm.worker_extension import ScoringWorkerExtension

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class VllmEngine(AsyncEngine):
    """An ``AsyncEngine`` that starts and stops vLLM's engine processes.

    Args:
        arguments: vLLM's arguments, made by ``startup``.
        real_ids: ``[head rows]``, False for rows without a token.
        description: facts for the manifest; ``candidate_ids`` and ``exact_tails`` are replaced by
            what this vLLM supports.
    """

    def __init__(
        self,
        arguments: AsyncEngineArgs,
        real_ids: NDArray[np.bool_],
        description: EngineDescription,
    ) -> None:
        self._real_ids = real_ids
        self._request_numbers = count()
        self._closed = False
        self._monitor = ExitMonitor()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        keeps_arrays = _keep_arrays()
        children = set(active_children())
        self._llm = self._call(_create(arguments))
        try:
            self._monitor.start([child for child in active_children() if child not in children])
            self._tails = self._extend_workers() and keeps_arrays
            candidates = self._call(self._supports_candidates())
            self._heartbeat = Heartbeat(self._ping)
            asyncio.run_coroutine_threadsafe(self._check_health(), self._loop)
        except BaseException:
            self.close()
            raise
        self._description = replace(description, candidate_ids=candidates, exact_tails=self._tails)

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest."""
        return self._description

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """See ``AsyncEngine.score``; only ``temperature`` 1 is supported."""
        if temperature != 1.0:
            raise ValueError(
                f"temperature: not supported by vLLM for prompts (found {temperature}, expected 1)"
            )
        if not len(task.completion_ids):
            return empty_scores(0 if task.candidate_ids else top_k), EngineTimes(0.0, 0.0)
        scoring = self._score(task, top_k)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scoring, self._loop))

    @property
    def silent_seconds(self) -> float:
        """See ``AsyncEngine.silent_seconds``."""
        return self._heartbeat.silent_seconds

    def on_crash(self, callback: Callable[[str], None]) -> None:
        """See ``AsyncEngine.on_crash``."""
        self._monitor.add_callback(callback)

    def close(self) -> None:
        """Stop vLLM's processes and the thread of the engine; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._monitor.close()
        self._llm.shutdown()
        del self._llm  # its destructor fails while the interpreter shuts down
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the engine's event loop; blocks the calling thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _ping(self) -> None:
        await self._llm.collective_rpc("check_health")

    async def _check_health(self) -> None:
        with suppress(VllmDeadError):  # reported by the monitor
            await self._heartbeat.run()

    def _extend_workers(self) -> bool:
        """Mask padding rows, end the workers with this process; return whether tails are exact."""
        extension = ScoringWorkerExtension
        padding = np.flatnonzero(~self._real_ids).tolist()
        if padding:
            self._call(self._llm.collective_rpc(extension.mask_head.__name__, args=(padding,)))
        self._call(self._llm.collective_rpc(extension.exit_with.__name__, args=(os.getpid(),)))
        return all(self._call(self._llm.collective_rpc(extension.append_tails.__name__)))

    async def _supports_candidates(self) -> bool:
        """Try to score given ids: support depends on vLLM's version and platform."""
        if "prompt_logprob_token_ids" not in SamplingParams.__struct_fields__:
            return False
        token = np.flatnonzero(self._real_ids)[:1].astype(np.int32)
        try:
            await self._score_candidates(ScoringTask(token, token, (token,)), (token,))
        except EngineCrashError:
            raise
        except Exception as error:  # any failure means that the feature is unavailable
            logger.info("candidate_ids are not supported: %s", first_line(error))
            return False
        return True

    async def _score(self, task: ScoringTask, top_k: int) -> tuple[TopKLogprobs, EngineTimes]:
        if task.candidate_ids is not None:
            return await self._score_candidates(task, task.candidate_ids)
        output = await self._generate(task, prompt_logprobs=top_k + self._tails, flat_logprobs=True)
        scores = _topk(
            output.prompt_logprobs,
            task.completion_ids,
            top_k=top_k,
            real_ids=int(self._real_ids.sum()),
            tails=self._tails,
        )
        self._require_masked_head(scores)
        return scores, _times(output)

    async def _score_candidates(
        self, task: ScoringTask, candidates: tuple[NDArray[np.int32], ...]
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """Score the candidates of each row, and in column 0 the completion token."""
        ids = pad_rows(candidates, max(map(len, candidates)))
        output = await self._generate(
            task,
            prompt_logprob_token_ids=np.column_stack([task.completion_ids, ids]),
            # vLLM counts from the position that predicts, one before the predicted token.
            prompt_logprob_start=len(task.prompt_ids) - 1,
        )
        logprobs = np.asarray(output.prompt_token_id_logprobs, dtype=np.float32)
        expected = (len(ids), 1 + ids.shape[1])
        if logprobs.shape != expected:
            raise RuntimeError(
                f"vLLM returned candidates of the wrong shape (found {logprobs.shape}, expected "
                f"{expected})"
            )
        scores = truncate(
            ids,
            logprobs[:, 1:],
            task.completion_ids,
            logprobs[:, 0],
            real_ids=int(self._real_ids.sum()),
        )
        return scores, _times(output)

    async def _generate(self, task: ScoringTask, **sampling: Any) -> RequestOutput:
        """Return vLLM's output for prompt and completion; runs in the engine's event loop."""
        ids = np.concatenate([task.prompt_ids, task.completion_ids]).tolist()
        prompt = TokensInput(type="token", prompt_token_ids=ids)
        parameters = SamplingParams(
            max_tokens=1,  # vLLM's minimum
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **sampling,
        )
        request = f"sequence-{next(self._request_numbers)}"
        final: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, parameters, request):
                final = output
        except VllmDeadError as error:
            raise EngineCrashError(await self._monitor.cause()) from error
        if final is None:
            raise RuntimeError("vLLM returned no output for a sequence")
        if final.outputs[0].finish_reason == "abort":  # by vLLM: own aborts cancel this coroutine
            raise EngineCrashError("vLLM is shutting down")
        return final

    def _require_masked_head(self, scores: TopKLogprobs) -> None:
        ids = scores.ids[scores.ids >= 0]
        if not self._real_ids[ids].all():
            raise RuntimeError(
                "vLLM returned probability for ids without a token: its head is not masked"
            )


def _keep_arrays() -> bool:
    """Patch vLLM to keep prompt log-probabilities as the arrays that its engine process sends.

    vLLM makes a Python object of every candidate, which takes longer than computing them. Returns
    False if vLLM's internals have changed: its lists are used instead.
    """
    update = getattr(LogprobsProcessor, "_update_prompt_logprobs", None)
    if update is None or len(signature(update).parameters) != 2:
        logger.warning("this version of vLLM is unknown: using its lists, which is slower")
        return False

    def keep(self: LogprobsProcessor, prompt_logprobs_tensors: LogprobsTensors) -> None:
        ids = prompt_logprobs_tensors.logprob_token_ids.numpy()
        logprobs = prompt_logprobs_tensors.logprobs.numpy()
        previous: Any = self.prompt_logprobs
        if isinstance(previous, PromptArrays):  # the engine sends a long prompt in parts
            ids = np.concatenate([previous.token_ids, ids])
            logprobs = np.concatenate([previous.logprobs, logprobs])
        vars(self)["prompt_logprobs"] = PromptArrays(ids, logprobs)

    vars(keep)["arrays"] = True
    if "arrays" not in vars(update):
        LogprobsProcessor._update_prompt_logprobs = keep  # pyright: ignore[reportPrivateUsage]
    return True


def _topk(
    logprobs: object,
    completion_ids: NDArray[np.int32],
    *,
    top_k: int,
    real_ids: int,
    tails: bool,
) -> TopKLogprobs:
    if isinstance(logprobs, PromptArrays):
        return topk_from_arrays(
            logprobs, completion_ids, top_k=top_k, real_ids=real_ids, tails=tails
        )
    if isinstance(logprobs, FlatLogprobs):
        return topk_from_lists(logprobs, completion_ids, top_k=top_k, real_ids=real_ids)
    raise RuntimeError(
        f"vLLM returned prompt log-probabilities of the wrong type (found "
        f"{type(logprobs).__name__}, expected FlatLogprobs)"
    )


async def _create(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def _times(output: RequestOutput) -> EngineTimes:
    """Return the times of vLLM's own clock, NaN without statistics."""
    stats = output.metrics
    if stats is None:
        return EngineTimes(float("nan"), float("nan"))
    return EngineTimes(
        stats.scheduled_ts - stats.queued_ts, stats.first_token_ts - stats.scheduled_ts
    )
