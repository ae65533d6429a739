"""``VllmGeneration``: vLLM writes completions, with weights that are pushed to it after each step.

vLLM's ``AsyncLLM`` runs in an event loop of its own, in a thread; its engine runs in processes of
its own, which it starts and which end with this one.

The only file of the trainer that imports vllm.
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
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.rollouts.vllm.weight_sync import WeightPush
from mopd_trainer.rollouts.vllm.worker_extension import RolloutWorkerExtension
from mopd_trainer.student.student import Generation, Student

_Result = TypeVar("_Result")

#: vLLM imports the extension by name, in its worker processes.
_WORKER_EXTENSION = f"{RolloutWorkerExtension.__module__}.{RolloutWorkerExtension.__qualname__}"

#: For vLLM's processes to end by themselves.
_SHUTDOWN_SECONDS = 10

#: A completion that vLLM writes after each push, to see that it wrote with these weights.
_PROOF_PROMPT, _PROOF_TOKENS = 4, 8
#: Mean difference of its logprobs from the student's own, in nats; rounding makes some 1e-6 in
#: float32 on a CPU, TF32 on accelerators more.
_PROOF_GAP = {"float32": 0.05, "bfloat16": 0.25}

#: Of a token in a row of the student's most likely ids, where there are fewer than asked for.
_ABSENT = -1


class VllmGeneration:
    """A ``GenerationEngine`` in vLLM's processes, which it starts and ends.

    It samples from the student's distribution with the run's temperature and top-p, and from
    nothing that a model's publisher likes; the logprobs that it tells are of that distribution.

    Args:
        keep_topk: how many of the most likely ids of each token to keep beside the drawn one.

    Raises:
        ConfigError: when vLLM cannot load the model, or not under these settings.
    """

    def __init__(
        self,
        student: Student,
        model: StudentConfig,
        rollout: RolloutConfig,
        push: WeightPush,
        *,
        keep_topk: int = 0,
    ) -> None:
        self._student = student
        self._rollout = rollout
        self._push = push
        self._dtype = model.dtype
        self._keep_topk = keep_topk
        self._requests = count()
        self._pushes = count(1)
        self._adapters: LoRARequest | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm", daemon=True)
        self._thread.start()
        try:
            arguments = AsyncEngineArgs(**_arguments(student, model, rollout, keep_topk))
            self._llm: AsyncLLM | None = self._wait_for(_started(arguments))
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            self._end_loop()
            raise ConfigError(
                f"vLLM cannot load the student {model.model!r}: {_first_line(error)}; its log "
                "above says more, and rollout.engine 'transformers' may do"
            ) from error
        try:
            self._wait_for(self._extend_workers())
        except BaseException:
            self.close()
            raise

    async def generate(self, prompt_ids: Sequence[int], *, seed: int) -> Generation:
        """See ``GenerationEngine``."""
        return await self._in_loop(self._generate(prompt_ids, seed))

    async def push(self) -> None:
        """See ``GenerationEngine``; what vLLM remembers of earlier prompts is forgotten.

        Raises:
            MopdError: when vLLM does not write with the student's weights afterwards.
        """
        await self._push.push(self._student, self)
        if not await self._in_loop(self._engine.reset_prefix_cache()):
            raise RuntimeError("vLLM kept prefixes of old weights; is something still in flight?")
        await self._require_taken()

    async def call_workers(self, method: str, options: Mapping[str, object]) -> object:
        """See ``WeightReceiver``."""
        return await self._in_loop(self._engine.collective_rpc(method, kwargs=dict(options)))

    async def take_adapters(self, folder: Path) -> None:
        """See ``WeightReceiver``.

        Every push has a number and a name of its own: under one that vLLM knows already it would
        go on with what it remembers.

        Raises:
            ConfigError: when vLLM cannot put adapters where the student has them.
        """
        number = next(self._pushes)
        adapters = LoRARequest(f"student-{number}", number, str(folder))
        if self._adapters is not None:
            await self._in_loop(self._engine.remove_lora(self._adapters.lora_int_id))
        try:
            await self._in_loop(self._engine.add_lora(adapters))
        except MopdError:
            raise
        except Exception as error:  # what went wrong in vLLM's processes comes without a type
            raise ConfigError(
                f"vLLM cannot write with the student's adapters: {_first_line(error)}; other "
                "student.lora.target_modules, or rollout.engine 'transformers', may do"
            ) from error
        self._adapters = adapters

    def close(self) -> None:
        """Ends vLLM's processes and the thread that talks to them."""
        if self._llm is None:
            return
        self._llm.shutdown()
        self._llm = None  # its destructor must not run when the interpreter is half gone
        self._end_loop()

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError("this vLLM has been ended")
        return self._llm

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end_loop(self) -> None:
        self._wait_for(_all_ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wait_for(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _in_loop(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs it in vLLM's event loop; cancelled here, it is cancelled there."""
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return await asyncio.wrap_future(running)
        except EngineDeadError as error:
            raise MopdError(
                "vLLM, which writes the student's completions, has died; its log above says why, "
                "and resume_from_checkpoint=true goes on from the last checkpoint"
            ) from error

    async def _extend_workers(self) -> None:
        width, table = self._student.identity.logit_width, self._student.table
        padding = np.flatnonzero(~table.real_ids(width)).tolist()
        extend = self._engine.collective_rpc
        if padding:
            await extend(RolloutWorkerExtension.mask_head.__name__, args=(padding,))
        await extend(RolloutWorkerExtension.end_with.__name__, args=(os.getpid(),))

    async def _require_taken(self) -> None:
        """vLLM tells the student's own logprobs: what it loads of a push is its own affair, and
        weights that stay behind would show nowhere else."""
        prompt = np.flatnonzero(self._student.table.present)[:_PROOF_PROMPT].tolist()
        plain = {"max_new_tokens": _PROOF_TOKENS, "temperature": 1.0, "top_p": 1.0}
        rollout = self._rollout.model_copy(update=plain)
        written = await self._in_loop(self._generate(prompt, seed=0, rollout=rollout))
        own = await asyncio.to_thread(self._student.logprobs, prompt, written.token_ids)
        gap, limit = float(np.abs(own - written.logprobs).mean()), _PROOF_GAP[self._dtype]
        if not gap <= limit:
            raise MopdError(
                f"after a push vLLM's logprobs are {gap:.3g} nats from the student's (mean of "
                f"{len(own)} tokens, expected at most {limit:g} in {self._dtype}), so it does not "
                "write with the weights that it was given; set rollout.engine to 'transformers'"
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
            ignore_eos=True,  # what ends a turn is the tokenizer's, not the configuration's
            stop_token_ids=list(self._student.table.roles.ending),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensInput(type="token", prompt_token_ids=list(prompt_ids))
        written: CompletionOutput | None = None
        request = f"completion-{next(self._requests)}"
        async for output in self._engine.generate(
            prompt, sampling, request, lora_request=self._adapters
        ):
            written = output.outputs[0]
        if written is None or written.finish_reason == "abort":
            raise MopdError("vLLM gave up a completion: it is being ended")
        return _sampled(written, self._keep_topk)


def _sampled(written: CompletionOutput, keep_topk: int) -> Generation:
    """vLLM puts the drawn token first, then the most likely ones, at every position."""
    flat = written.logprobs
    ids = list(written.token_ids)
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(ids):
        raise RuntimeError(f"vLLM was asked for flat log-probabilities and gave {type(flat)}")
    starts = np.array(flat.start_indices)
    told = np.array(flat.token_ids)
    logprobs = np.array(flat.logprobs)
    if not np.array_equal(told[starts], ids):
        raise RuntimeError("vLLM's first log-probabilities are not of the tokens that it drew")
    top = None
    if keep_topk:
        places = starts[:, None] + 1 + np.arange(keep_topk)
        top = np.where(np.isneginf(logprobs[places]), _ABSENT, told[places]).astype(np.int32)
    return Generation(ids, logprobs[starts].tolist(), top)


async def _all_ended() -> None:
    """What vLLM still does in this event loop, which is about to stop, is over."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _started(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def _arguments(
    student: Student, model: StudentConfig, rollout: RolloutConfig, keep_topk: int
) -> dict[str, Any]:
    settings = rollout.vllm
    sizes: dict[str, Any] = {"max_model_len": student.max_length} if student.max_length else {}
    if not current_platform.is_cpu():
        sizes["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return {
        **sizes,
        "model": model.model,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "skip_tokenizer_init": True,  # it reads ids and writes ids
        "generation_config": "vllm",  # what a publisher likes would change what is sampled
        # Of the distribution that was sampled from: after temperature and top-p.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(keep_topk, 1),
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Only samples of one prompt share more than a chat template's first tokens.
        "enable_prefix_caching": rollout.samples_per_prompt > 1,
        "worker_extension_cls": _WORKER_EXTENSION,
        # Compiling pays where a step is short next to its launches, which on a CPU it is not.
        "enforce_eager": current_platform.is_cpu(),
        "disable_log_stats": True,
        "shutdown_timeout": _SHUTDOWN_SECONDS,
        **({} if model.lora is None else _room_for_adapters(model.lora.rank)),
    }


def _room_for_adapters(rank: int) -> dict[str, Any]:
    """For those of one version; vLLM knows some ranks, and takes any below the one it is told."""
    known = min(most for most in get_args(MaxLoRARanks) if most >= rank)
    return {"enable_lora": True, "max_lora_rank": known, "max_loras": 1, "max_cpu_loras": 1}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
