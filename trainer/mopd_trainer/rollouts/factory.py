"""Which completion source a run's settings ask for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import student_topk
from mopd_trainer.rollouts.engine_sampler import StreamedSampler
from mopd_trainer.rollouts.reference_completions import AnswerReader
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers, WorkerGeneration, WorkerSampler
from mopd_trainer.rollouts.source import CompletionSource, Mixture
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.rollouts.vllm.start import started_vllm
from mopd_trainer.student.student import Student


@asynccontextmanager
async def chosen_source(
    config: RunConfig,
    student: Student,
    *,
    version: int = 0,
    workers: RolloutWorkers | None = None,
) -> AsyncGenerator[CompletionSource]:
    """The student itself, the data's reference answers, or both.

    Args:
        version: steps behind the student's weights.
        workers: who writes for the student, where it does not itself.

    Raises:
        ConfigError: when the student is to write with vLLM, and cannot.
    """
    share = config.data.rollout_share
    answers = AnswerReader(
        student.identity,
        config.rollout,
        max_length=student.max_length,
        judged=config.scores_reference_answers,
    )
    if not config.samples_rollouts:  # a replay completes nothing, and needs no engine
        yield answers
        return
    async with _rollouts(config, student, version, workers) as rollouts:
        if share == 1:
            yield rollouts
        else:
            yield Mixture(rollouts, answers, rollout_share=share, seed=config.seed)


@asynccontextmanager
async def _rollouts(
    config: RunConfig, student: Student, version: int, workers: RolloutWorkers | None
) -> AsyncGenerator[CompletionSource]:
    if workers is not None:
        source = _by_workers(config, student, version, workers)
        await source.push(version)  # they have read student.model, not a resumed run's weights
        yield source
        return
    keep_topk = student_topk(config.scoring_teachers)
    if config.rollout.engine == "transformers":
        yield Sampler(
            student, config.rollout, seed=config.seed, keep_topk=keep_topk, version=version
        )
        return
    engine = await asyncio.to_thread(started_vllm, config, student)
    try:
        sampler = StreamedSampler(
            engine, student, config.rollout, seed=config.seed, version=version
        )
        await sampler.push(version)  # it has read student.model, not the weights of a resumed run
        yield sampler
    finally:
        await asyncio.to_thread(engine.close)


def _by_workers(
    config: RunConfig, student: Student, version: int, workers: RolloutWorkers
) -> CompletionSource:
    if config.rollout.engine == "transformers":
        return WorkerSampler(workers, student, config.rollout, seed=config.seed)
    engine = WorkerGeneration(workers, student, version=version)
    return StreamedSampler(engine, student, config.rollout, seed=config.seed, version=version)
