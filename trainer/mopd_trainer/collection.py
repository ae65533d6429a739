"""One step's examples: completions are scored while others are being written, or after all."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.rollouts.source import CompletionBatch, CompletionSource
from mopd_trainer.teachers.scoring import RolloutScorer


async def collect(
    prompts: Sequence[Prompt],
    source: CompletionSource,
    scorer: RolloutScorer,
    step: int,
    *,
    scoring: Literal["stream", "after_rollout"] = "stream",
    clock: StepTimer | None = None,
    written: asyncio.Event | None = None,
) -> tuple[list[TrainingExample], Metrics]:
    """The step's examples, in the order of its prompts, and what was dropped: all of it, at worst.

    What is dropped while several steps are collected is told with the one that ends first.

    Args:
        written: set when the last completion is, and its teachers may still be at work.
    """
    clock = clock or StepTimer()
    asked: list[tuple[int, asyncio.Task[list[TrainingExample]]]] = []
    async with asyncio.TaskGroup() as group:

        def ask(completed: CompletionBatch) -> None:
            task = group.create_task(_score(scorer, completed.rollouts, clock))
            asked.append((completed.place, task))

        held: list[CompletionBatch] = []
        with clock.phase("sample"):
            async with aclosing(source.complete(prompts, step=step)) as finished:
                async for completed in finished:
                    if scoring == "stream":
                        ask(completed)
                    else:
                        held.append(completed)
        if written is not None:
            written.set()
        for completed in held:
            ask(completed)
    in_order = sorted(asked, key=lambda each: each[0])
    examples = [example for _, task in in_order for example in task.result()]
    incomplete, dropped = source.pop_dropped(), scorer.pop_dropped()
    dropped["total"] += incomplete.total()  # the scorer has counted its own samples, once each
    dropped.update(incomplete)
    return examples, {f"dropped/{reason}": float(n) for reason, n in (+dropped).items()}


async def _score(
    scorer: RolloutScorer, rollouts: Sequence[Rollout], clock: StepTimer
) -> list[TrainingExample]:
    if not any(rollout.prompt.teachers for rollout in rollouts):
        return await scorer.score(rollouts)  # nobody is asked
    with clock.phase("score"):
        return await scorer.score(rollouts)
