"""``VllmEngine``: scores with vLLM's ``AsyncLLM`` in this process.

Prompt and completion are one vLLM prompt. vLLM batches all sequences in flight at every step, and
its workers compute the distributions of completion tokens (``completion_rows``). The engine runs
in a separate event loop and thread, so that its bookkeeping does not delay the HTTP server and any
event loop can call the engine.
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
from vllm.lora.request import LoRARequest
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
)
from mopd_server.engines.vllm.completion_rows import RowRequest
from mopd_server.engines.vllm.flat_logprobs import CompletionArrays, pad_rows, topk_from_lists
from mopd_server.engines.vllm.processes.exit_monitor import ExitMonitor
from mopd_server.engines.vllm.processes.heartbeat import Heartbeat
from mopd_server.engines.vllm.processes.stderr_tail import StderrTail
from mopd_server.engines.vllm.worker_extension import ScoringWorkerExtension

logger = logging.getLogger(__name__)

#: For the last lines of processes that could not start.
_LAST_LINES_SECONDS = 2.0

#: For tasks to end on closing; an engine that hangs does not block it.
_CANCEL_SECONDS = 5.0

#: For vLLM's processes to end; they leave shared memory behind if they are killed.
_SHUTDOWN_SECONDS = 10.0

_Result = TypeVar("_Result")


class VllmEngine(AsyncEngine):
    """An ``AsyncEngine`` that starts and stops vLLM's engine processes.

    Args:
        arguments: vLLM's arguments, made by ``startup``.
        real_ids: ``[head rows]``, False for rows without a token.
        description: facts for the manifest; its features are replaced by what this vLLM supports.
    """

    def __init__(
        self,
        arguments: AsyncEngineArgs,
        real_ids: NDArray[np.bool_],
        description: EngineDescription,
    ) -> None:
        self._real_ids = real_ids
        self._adapters = {
            adapter.name: LoRARequest(adapter.name, number, str(adapter.folder.absolute()))
            for number, adapter in enumerate(description.adapters, start=1)
        }
        self._request_numbers = count()
        self._can_suspend = arguments.enable_sleep_mode
        self._closed = False
        stderr = StderrTail()
        self._monitor = ExitMonitor(stderr.first_error)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        children = set(active_children())
        try:
            with stderr.inherited():
                self._llm = self._call(_create(arguments))
        except RuntimeError as error:
            # Usually "Failed core proc(s): {}".
            if cause := stderr.first_error(wait_seconds=_LAST_LINES_SECONDS):
                raise RuntimeError(cause) from error
            raise
        try:
            self._monitor.start([child for child in active_children() if child not in children])
            self._rows = self._extend_workers() and _keep_arrays()
            self._heartbeat = Heartbeat(self._ping)
            asyncio.run_coroutine_threadsafe(self._check_health(), self._loop)
        except BaseException:
            self.close()
            raise
        if not self._rows:
            logger.warning(
                "vLLM %s is unknown: using its lists of all prompt tokens, which is slower, "
                "without candidate_ids, temperatures and exact tails",
                description.engine_version,
            )
        self._description = replace(
            description,
            candidate_ids=self._rows,
            temperature=self._rows,
            exact_tails=self._rows,
        )

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest."""
        return self._description

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """See ``AsyncEngine.score``."""
        if not len(task.completion_ids):
            return empty_scores(0 if task.candidate_ids else top_k), EngineTimes(0.0, 0.0)
        scoring = self._score(task, top_k, temperature)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scoring, self._loop))

    @property
    def silent_seconds(self) -> float:
        """See ``AsyncEngine.silent_seconds``."""
        return self._heartbeat.silent_seconds

    def on_crash(self, callback: Callable[[str], None]) -> None:
        """See ``AsyncEngine.on_crash``."""
        self._monitor.add_callback(callback)

    @property
    def can_suspend(self) -> bool:
        """See ``AsyncEngine.can_suspend``."""
        return self._can_suspend

    def suspend(self) -> None:
        """See ``AsyncEngine.suspend``; the host's memory keeps the weights."""
        self._call(self._llm.sleep(level=1))

    def resume(self) -> None:
        """See ``AsyncEngine.resume``."""
        self._call(self._llm.wake_up())

    def close(self) -> None:
        """Stop vLLM's processes and the thread of the engine; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._monitor.close()
        self._call(_cancel_tasks())  # before the processes that these use are stopped
        self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        del self._llm  # its destructor fails while the interpreter shuts down
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

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
        """Mask padding rows, end the workers with this process; return whether vLLM is known."""
        extension = ScoringWorkerExtension
        padding = np.flatnonzero(~self._real_ids).tolist()
        if padding:
            self._call(self._llm.collective_rpc(extension.mask_head.__name__, args=(padding,)))
        self._call(self._llm.collective_rpc(extension.exit_with.__name__, args=(os.getpid(),)))
        width = (len(self._real_ids),)
        rows = self._llm.collective_rpc(extension.score_completion_rows.__name__, args=width)
        return all(self._call(rows))

    async def _score(
        self, task: ScoringTask, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        if not self._rows:
            return await self._score_by_lists(task, top_k)
        candidates = None if task.candidate_ids is None else pad_rows(task.candidate_ids)
        request = RowRequest(
            len(task.prompt_ids) - 1, task.completion_ids, top_k, temperature, candidates
        )
        for skip_cache in (False, True):
            output = await self._generate(
                task,
                prompt_logprobs=0,
                extra_args=request.encode(),
                skip_reading_prefix_cache=skip_cache,
            )
            arrays: Any = output.prompt_logprobs
            if (scores := arrays.scores(len(task.completion_ids))) is not None:
                self._require_masked_head(scores)
                return scores, _times(output)
        raise RuntimeError(
            "vLLM did not compute all completion tokens of a sequence, also without its cache"
        )

    async def _score_by_lists(
        self, task: ScoringTask, top_k: int
    ) -> tuple[TopKLogprobs, EngineTimes]:
        output = await self._generate(task, prompt_logprobs=top_k, flat_logprobs=True)
        flat: Any = output.prompt_logprobs
        scores = topk_from_lists(
            flat, task.completion_ids, top_k=top_k, real_ids=int(self._real_ids.sum())
        )
        self._require_masked_head(scores)
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
            async for output in self._llm.generate(
                prompt, parameters, request, lora_request=self._adapters.get(task.adapter or "")
            ):
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
    """Patch vLLM to keep the arrays of its workers instead of making an object of every entry.

    Returns False if vLLM's internals have changed.
    """
    update = getattr(LogprobsProcessor, "_update_prompt_logprobs", None)
    if update is None or len(signature(update).parameters) != 2:
        return False

    def keep(self: LogprobsProcessor, prompt_logprobs_tensors: LogprobsTensors) -> None:
        tensors = prompt_logprobs_tensors
        arrays = CompletionArrays(
            tensors.logprob_token_ids.numpy(),
            tensors.logprobs.numpy(),
            tensors.selected_token_ranks.numpy(),
        )
        vars(self)["prompt_logprobs"] = arrays

    LogprobsProcessor._update_prompt_logprobs = keep  # pyright: ignore[reportPrivateUsage]
    return True


async def _cancel_tasks() -> None:
    """Cancel all other tasks of this event loop: health checks, requests, vLLM's own."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


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
