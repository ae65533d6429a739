"""``VllmEngine``: vLLM as the rollout engine; weights are pushed to it after each step.

vLLM's ``AsyncLLM`` runs in an event loop in a thread; its engine core and workers run in child
processes, which exit with this process.

The only module of the trainer that imports vllm.
"""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensInput
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from mopd_protocol.errors import ConfigError, MopdError
from mopd_protocol.runtime.host_memory import cpu_cache_bytes
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.rollouts.vllm.weight_sync import WeightPush
from mopd_trainer.rollouts.vllm.worker_extension import RolloutWorkerExtension
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student

_Result = TypeVar("_Result")

#: vLLM imports the extension by name, in its worker processes.
_WORKER_EXTENSION = f"{RolloutWorkerExtension.__module__}.{RolloutWorkerExtension.__qualname__}"

#: Time for vLLM's processes to exit.
_SHUTDOWN_SECONDS = 10

#: Tokens of the completion that checks each push.
_CHECK_PROMPT, _CHECK_TOKENS = 4, 8
#: Largest mean difference between vLLM's and the student's logprobs, in nats; rounding causes about
#: 1e-6 in float32 on a CPU, and more with TF32 on accelerators.
_CHECK_GAP = {"float32": 0.05, "bfloat16": 0.25}

#: Missing id in a row of the student's most likely ids.
_MISSING = -1


class VllmEngine:
    """A ``GenerationEngine`` in vLLM's processes.

    Samples from the student's distribution with the run's temperature and top-p, and returns
    logprobs of that distribution; the publisher's generation settings are ignored.

    Args:
        keep_topk: most likely ids to keep at each token with the drawn one.
        keep_entropies: keep the entropy of these ids, and of all others as one, with them.

    Raises:
        ConfigError: when vLLM cannot load the model with these settings.
    """

    def __init__(
        self,
        student: Student,
        model: StudentConfig,
        rollout: RolloutConfig,
        push: WeightPush,
        *,
        keep_topk: int = 0,
        keep_entropies: bool = False,
    ) -> None:
        self._student = student
        self._rollout = rollout
        self._push = push
        self._dtype = model.dtype
        self._keep_topk = keep_topk
        self._keep_entropies = keep_entropies
        self._requests = count()
        self._pushes = count(1)
        self._adapters: LoRARequest | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        try:
            arguments = AsyncEngineArgs(**_arguments(student, model, rollout, keep_topk))
            self._llm: AsyncLLM | None = self._wait_for(_start(arguments))
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            self._end_loop()
            raise ConfigError(
                f"rollout.engine: vLLM failed to load the student {model.model!r}: "
                f"{_first_line(error)}. See its log above, or set rollout.engine to "
                "'transformers'.",
                key="rollout.engine",
            ) from error
        try:
            self._wait_for(self._extend_workers())
        except BaseException:
            self.close()
            raise

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, settings: RolloutConfig | None = None
    ) -> Generation:
        """See ``GenerationEngine``."""
        return await self._in_loop(self._generate(prompt_ids, seed, settings))

    async def push_weights(self) -> None:
        """See ``GenerationEngine``; also resets vLLM's prefix cache.

        Raises:
            MopdError: when vLLM's logprobs differ from the student's after the push.
        """
        await self._push.push(self._student, self)
        if not await self._in_loop(self._engine.reset_prefix_cache()):
            raise RuntimeError("vLLM kept prefixes of old weights; is a request in flight?")
        await self._check_weights()

    async def call_workers(self, method: str, options: Mapping[str, object]) -> object:
        """See ``WeightReceiver``."""
        return await self._in_loop(self._engine.collective_rpc(method, kwargs=dict(options)))

    async def load_adapters(self, folder: Path) -> None:
        """See ``WeightReceiver``.

        Every push has a new number and name: vLLM caches adapters by these.

        Raises:
            ConfigError: when vLLM does not support the student's adapters.
        """
        number = next(self._pushes)
        adapters = LoRARequest(f"student-{number}", number, str(folder))
        if self._adapters is not None:
            await self._in_loop(self._engine.remove_lora(self._adapters.lora_int_id))
        try:
            await self._in_loop(self._engine.add_lora(adapters))
        except MopdError:
            raise
        except Exception as error:  # errors of vLLM's processes arrive without their type
            raise ConfigError(
                f"student.lora: vLLM does not support these adapters: {_first_line(error)}. Change "
                "student.lora.target_modules, or set rollout.engine to 'transformers'.",
                key="student.lora.target_modules",
            ) from error
        self._adapters = adapters

    def close(self) -> None:
        """Shut down vLLM's processes and its event loop."""
        if self._llm is None:
            return
        self._llm.shutdown()
        self._llm = None  # its destructor must not run during interpreter shutdown
        self._end_loop()

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError("vLLM is closed")
        return self._llm

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end_loop(self) -> None:
        self._wait_for(_cancel_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wait_for(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _in_loop(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in vLLM's event loop; cancellation is forwarded."""
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return await asyncio.wrap_future(running)
        except EngineDeadError as error:
            raise MopdError(
                "rollout.engine: vLLM crashed. See its log above, and resume from the last "
                "checkpoint with resume_from_checkpoint=true.",
                key="rollout.engine",
            ) from error

    async def _extend_workers(self) -> None:
        width, table = self._student.identity.logit_width, self._student.table
        padding = np.flatnonzero(~table.real_ids(width)).tolist()
        extend = self._engine.collective_rpc
        if padding:
            await extend(RolloutWorkerExtension.mask_head.__name__, args=(padding,))
        await extend(RolloutWorkerExtension.end_with.__name__, args=(os.getpid(),))

    async def _check_weights(self) -> None:
        """Compare vLLM's logprobs with the student's: a partial weight update is otherwise silent.

        Raises:
            MopdError: when they differ.
        """
        prompt = np.flatnonzero(self._student.table.present)[:_CHECK_PROMPT].tolist()
        plain = {"max_new_tokens": _CHECK_TOKENS, "temperature": 1.0, "top_p": 1.0}
        rollout = self._rollout.model_copy(update=plain)
        generated = await self._in_loop(self._generate(prompt, seed=0, rollout=rollout))
        expected = await asyncio.to_thread(self._student.logprobs, prompt, generated.token_ids)
        gap, limit = float(np.abs(expected - generated.logprobs).mean()), _CHECK_GAP[self._dtype]
        if not gap <= limit:
            raise MopdError(
                "rollout.engine: vLLM did not load the pushed weights: its logprobs differ from "
                f"the student's (found a mean of {gap:.3g} nats over {len(expected)} tokens, "
                f"expected at most {limit:g} in {self._dtype}). Set rollout.engine to "
                "'transformers'.",
                key="rollout.engine",
            )

    async def _generate(
        self, prompt_ids: Sequence[int], seed: int, rollout: RolloutConfig | None = None
    ) -> Generation:
        rollout = rollout or self._rollout
        sampling = SamplingParams(
            max_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            seed=seed,
            logprobs=self._keep_topk,
            flat_logprobs=True,
            ignore_eos=True,  # the tokenizer's ending ids count, not the model config's
            stop_token_ids=list(self._student.table.roles.ending),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensInput(type="token", prompt_token_ids=list(prompt_ids))
        completion: CompletionOutput | None = None
        request = f"completion-{next(self._requests)}"
        async for output in self._engine.generate(
            prompt, sampling, request, lora_request=self._adapters
        ):
            completion = output.outputs[0]
        if completion is None or completion.finish_reason == "abort":
            raise MopdError("rollout.engine: vLLM aborted a completion: it is shutting down")
        return _generation(completion, self._keep_topk, self._keep_entropies)


def _generation(completion: CompletionOutput, keep_topk: int, keep_entropies: bool) -> Generation:
    """Convert an output; at every position vLLM lists the drawn token, then the most likely."""
    flat = completion.logprobs
    ids = list(completion.token_ids)
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(ids):
        raise RuntimeError(f"vLLM: expected flat log-probabilities (found {type(flat)})")
    starts = np.array(flat.start_indices)
    candidates = np.array(flat.token_ids)
    logprobs = np.array(flat.logprobs)
    if not np.array_equal(candidates[starts], ids):
        raise RuntimeError("vLLM: the first log-probabilities are not of the drawn tokens")
    top = entropies = None
    if keep_topk:
        columns = starts[:, None] + 1 + np.arange(keep_topk)
        top = np.where(np.isneginf(logprobs[columns]), _MISSING, candidates[columns])
        top = top.astype(np.int32)
        if keep_entropies:
            likely = np.exp(logprobs[columns].astype(np.float64))
            every = np.column_stack([likely, np.maximum(1 - likely.sum(axis=1), 0.0)])
            entropies = -(every * np.log(np.maximum(every, 1e-30))).sum(axis=1)
    return Generation(ids, logprobs[starts].tolist(), top, entropies)


async def _cancel_tasks() -> None:
    """Cancel vLLM's remaining tasks before its event loop stops."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def _arguments(
    student: Student, model: StudentConfig, rollout: RolloutConfig, keep_topk: int
) -> dict[str, Any]:
    settings = rollout.vllm
    sizes: dict[str, Any] = {"max_model_len": student.max_length} if student.max_length else {}
    if current_platform.is_cpu():  # VLLM_CPU_KVCACHE_SPACE, in GiB, overrides this size
        sizes["kv_cache_memory_bytes"] = cpu_cache_bytes()
    else:
        sizes["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return {
        **sizes,
        "model": model.model,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # ignore the model's generation_config.json
        # Logprobs of the sampled distribution: after temperature and top-p.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(keep_topk, 1),
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Only samples of one prompt, and corrected completions, share a long prefix.
        "enable_prefix_caching": rollout.samples_per_prompt > 1 or rollout.corrections > 0,
        "worker_extension_cls": _WORKER_EXTENSION,
        # Compilation saves kernel launches, which do not matter on a CPU.
        "enforce_eager": current_platform.is_cpu(),
        "disable_log_stats": True,
        "shutdown_timeout": _SHUTDOWN_SECONDS,
        **({} if model.lora is None else _lora_arguments(model.lora.rank)),
    }


def _lora_arguments(rank: int) -> dict[str, Any]:
    """Return the arguments for one set of adapters.

    vLLM supports a fixed list of LoRA ranks; use the smallest that fits.
    """
    max_rank = min(supported for supported in get_args(MaxLoRARanks) if supported >= rank)
    return {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": 1, "max_cpu_loras": 1}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
