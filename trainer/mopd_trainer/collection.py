"""Collect the examples of a step: sample completions, grade and score them, align, correct them."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.corrections import Corrector
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.evaluation.rewards import RolloutGrader
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
    corrector: Corrector | None = None,
    grader: RolloutGrader | None = None,
    scoring: Literal["stream", "after_rollout"] = "stream",
    drop_truncated: bool = False,
    timer: StepTimer | None = None,
    sampled: asyncio.Event | None = None,
) -> tuple[list[TrainingExample], Metrics]:
    """Return the examples of a step in the order of its prompts, and the dropped samples.

    When several steps are collected at once, samples dropped meanwhile are counted in the step that
    is complete first.

    Args:
        corrector: of scored completions, batch by batch.
        grader: of sampled completions, before they are scored; default: no rewards.
        scoring: score batches while others are sampled, or after the last one.
        drop_truncated: drop sampled completions without an end, before they are scored, and
            corrected ones without an end.
        sampled: set after the last completion, while some may still be scored.
    """
    timer, sampled = timer or StepTimer(), sampled or asyncio.Event()
    grader = grader or RolloutGrader({})
    dropped_truncated = 0
    scores: list[tuple[int, asyncio.Task[list[TrainingExample]]]] = []

    def is_dropped(rollout: Rollout) -> bool:
        return drop_truncated and _is_truncated(rollout)

    async with asyncio.TaskGroup() as group:

        async def scored(batch: CompletionBatch) -> list[TrainingExample]:
            nonlocal dropped_truncated
            graded = batch.rollouts
            if grader.rewards:  # else batches are scored in the order in which they are sampled
                graded = await asyncio.to_thread(grader.graded, batch.rollouts)
            rollouts = [each for each in graded if not is_dropped(each)]
            examples = await _score(scorer, grader.gated(rollouts), timer, sampled)
            if corrector is not None:
                examples = await corrector.corrected(examples, step=step, place=batch.place)
            kept = [each for each in examples if not is_dropped(each.rollout)]
            dropped_truncated += len(batch.rollouts) - len(rollouts) + len(examples) - len(kept)
            return kept

        def score(batch: CompletionBatch) -> None:
            scores.append((batch.place, group.create_task(scored(batch))))

        deferred: list[CompletionBatch] = []
        with timer.phase("sample"):
            async with aclosing(source.sample(prompts, step=step)) as batches:
                async for batch in batches:
                    if scoring == "stream":
                        score(batch)
                    else:
                        deferred.append(batch)
        sampled.set()
        for batch in deferred:
            score(batch)
    in_order = sorted(scores, key=lambda each: each[0])
    examples = [example for _, task in in_order for example in task.result()]
    not_sampled, dropped = source.pop_dropped(), scorer.pop_dropped()
    dropped["total"] += not_sampled.total()  # the scorer's total counts its own samples once each
    dropped.update(not_sampled)
    dropped.update(dict.fromkeys(("total", "truncated"), dropped_truncated))
    return examples, {f"dropped/{reason}": float(n) for reason, n in (+dropped).items()}


def _is_truncated(rollout: Rollout) -> bool:
    return rollout.source == "rollout" and rollout.finish_reason == "length"


async def _score(
    scorer: RolloutScorer, rollouts: Sequence[Rollout], timer: StepTimer, sampled: asyncio.Event
) -> list[TrainingExample]:
    if not any(rollout.prompt.teachers for rollout in rollouts):
        return await scorer.score(rollouts, sampled=sampled)  # no request, no scoring time
    with timer.phase("score"):
        return await scorer.score(rollouts, sampled=sampled)
