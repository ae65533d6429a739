"""Open the completion source of a run's settings."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mopd_trainer.config.run import RunConfig
from mopd_trainer.rollouts.agents.sampler import AgentSampler
from mopd_trainer.rollouts.engine import configured_engine
from mopd_trainer.rollouts.engine_sampler import EngineSampler
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers, WorkerEngine, WorkerSampler
from mopd_trainer.rollouts.source import CompletionGenerator, CompletionSource, Mixture
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student

_Sampler = Sampler | WorkerSampler | EngineSampler


@asynccontextmanager
async def open_source(
    config: RunConfig,
    student: Student,
    *,
    version: int = 0,
    workers: RolloutWorkers | None = None,
) -> AsyncGenerator[tuple[CompletionSource, CompletionGenerator]]:
    """Open the sampler, which an agent may lead, the data's reference answers, or a mixture of
    both; and the generator of completions for an evaluation, which is the sampler, or the student
    if the run has no sampler.

    Args:
        version: steps behind the student's weights.
        workers: processes that sample for the student; default: this process or its engine.

    Raises:
        ConfigError: when the rollout engine cannot be started.
    """
    share = config.data.rollout_share
    references = ReferenceCompletions(
        student.identity,
        config.rollout,
        max_length=student.max_length,
        scored=config.scores_reference_answers,
    )
    if not config.samples_rollouts:  # nor does a replay, which needs no engine
        rollout = config.rollout.model_copy(update={"max_staleness": 0})
        yield references, Sampler(student, rollout, seed=config.seed)
        return
    async with _open_sampler(config, student, version, workers) as sampler:
        source: CompletionSource = sampler
        if config.rollout.agent is not None:
            source = AgentSampler(
                sampler, student.identity, config.rollout, seed=config.seed, version=version
            )
        if share < 1:
            source = Mixture(source, references, rollout_share=share, seed=config.seed)
        yield source, sampler


@asynccontextmanager
async def _open_sampler(
    config: RunConfig, student: Student, version: int, workers: RolloutWorkers | None
) -> AsyncGenerator[_Sampler]:
    rollout, seed = config.rollout, config.seed
    row = configured_engine(rollout)
    if row is None:
        if workers is None:
            yield Sampler(
                student,
                rollout,
                seed=seed,
                keep_topk=config.kept_topk,
                keep_entropies=config.tokens.keeps_entropies,
                version=version,
            )
            return
        worker_sampler = WorkerSampler(workers, student, rollout, seed=seed)
        await worker_sampler.push_weights(version)  # workers loaded student.model
        yield worker_sampler
        return
    if workers is None:
        engine = await asyncio.to_thread(row.start, config, student)
    else:
        engine = WorkerEngine(workers, student, version=version)
    try:
        sampler = EngineSampler(engine, student, rollout, seed=seed, version=version)
        await sampler.push_weights(version)  # the engine loaded student.model
        yield sampler
    finally:
        await asyncio.to_thread(engine.close)
