"""Which completion source a run's settings ask for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mopd_protocol.errors import ConfigError
from mopd_protocol.vllm_environment import prepare_environment
from mopd_trainer.answers import AnswerReader
from mopd_trainer.completion_source import CompletionSource, Mixture
from mopd_trainer.config import RunConfig
from mopd_trainer.rollouts import Sampler
from mopd_trainer.streamed_rollouts import StreamedSampler
from mopd_trainer.student import Student
from mopd_trainer.teacher_config import student_topk
from mopd_trainer.weight_push import weight_push


@asynccontextmanager
async def chosen_source(
    config: RunConfig, student: Student, *, version: int = 0
) -> AsyncGenerator[CompletionSource]:
    """The student itself, the data's reference answers, or both.

    Args:
        version: steps behind the student's weights.

    Raises:
        ConfigError: when the student is to write with vLLM, and cannot.
    """
    share = config.data.rollout_share
    answers = AnswerReader(
        student.identity,
        config.rollout,
        max_length=student.max_length,
        judged=config.judges_answers,
    )
    if share == 0 or config.replay is not None:  # which completes nothing, and needs no engine
        yield answers
        return
    async with _rollouts(config, student, version) as rollouts:
        if share == 1:
            yield rollouts
        else:
            yield Mixture(rollouts, answers, rollout_share=share, seed=config.seed)


@asynccontextmanager
async def _rollouts(
    config: RunConfig, student: Student, version: int
) -> AsyncGenerator[CompletionSource]:
    keep_topk = student_topk(config.judges)
    if config.rollout.engine == "transformers":
        yield Sampler(
            student, config.rollout, seed=config.seed, keep_topk=keep_topk, version=version
        )
        return
    prepare_environment()
    try:
        from mopd_trainer.vllm_generation import VllmGeneration
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine 'vllm' needs vLLM, which cannot be imported here ({error}); install "
            "mopd[vllm], or take rollout.engine 'transformers'"
        ) from error
    push = weight_push(config.student, config.rollout.vllm.weights_folder)
    engine = await asyncio.to_thread(
        VllmGeneration, student, config.student, config.rollout, push, keep_topk=keep_topk
    )
    try:
        sampler = StreamedSampler(
            engine, student, config.rollout, seed=config.seed, version=version
        )
        await sampler.push(version)  # it has read student.model, not the weights of a resumed run
        yield sampler
    finally:
        await asyncio.to_thread(engine.close)
