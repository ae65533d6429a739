"""``RunEvaluation``: the evaluations of a run, when they are due, and the gap to the teachers."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mopd_trainer.config.run import RunConfig
from mopd_trainer.evaluation.metric_names import by_model, prefixed
from mopd_trainer.evaluation.models import EvaluatedModel, StudentModel
from mopd_trainer.evaluation.results import evaluate_set, gaps_closed
from mopd_trainer.evaluation.sets import EvaluationSet
from mopd_trainer.metrics.step_metrics import Metrics


class RunEvaluation:
    """Evaluate the student before the first step, every ``every`` steps, and after the last.

    Completions have the same seeds in each evaluation, and no random state of the training is
    used. The first evaluation in the journal is the student's state before, and has the results of
    the teachers, which are evaluated once.

    Args:
        done: evaluations of earlier parts of the run, as lines of the journal.
    """

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[EvaluationSet],
        student: StudentModel,
        teachers: Mapping[str, EvaluatedModel],
        done: Sequence[Mapping[str, Any]],
    ) -> None:
        self._config = config
        self._sets = sets
        self._student = student
        self._teachers = teachers
        self._first = by_model(done[0]) if done else {}
        self._last_step: int | None = done[-1]["step"] if done else None
        self._ended: float | None = None

    def is_due(self, steps: int) -> bool:
        """Return True if the weights after ``steps`` steps must be evaluated."""
        evaluation = self._config.evaluation
        if evaluation is None or steps == self._last_step:
            return False
        first = self._last_step is None
        return first or steps % evaluation.every == 0 or steps == self._config.max_steps

    async def evaluate(self, steps: int) -> Metrics:
        """Evaluate the weights after ``steps`` steps; return ``evaluation/…``.

        Raises:
            MopdError: when sampling or a teacher fails.
        """
        started = time.perf_counter()
        await self._student.push_weights(steps)
        metrics: Metrics = {}
        if not self._first:
            metrics |= await evaluate_teachers(self._config, self._sets, self._teachers)
        for each in self._sets:
            result = await evaluate_set(
                self._student, each, self._config.rollout, seed=self._config.seed
            )
            values = result.metrics()
            first = self._first or by_model(metrics)
            before = first.get("", {}).get(each.name, values)
            teachers = {t: first[t][each.name] for t in first if t and each.name in first[t]}
            values |= gaps_closed(values, before, teachers)
            metrics |= prefixed(values, each.name)
        self._first = self._first or by_model(metrics)
        self._last_step = steps
        ended = time.perf_counter()
        if self._ended is not None:
            metrics["time/evaluate_share"] = (ended - started) / (ended - self._ended)
        self._ended = ended
        return metrics


async def evaluate_teachers(
    config: RunConfig, sets: Sequence[EvaluationSet], teachers: Mapping[str, EvaluatedModel]
) -> Metrics:
    """Return ``evaluation/<set>/teacher/<teacher>/…`` of the teachers to evaluate."""
    metrics: Metrics = {}
    for each in sets:
        for name in config.evaluated_teachers(each.name):
            result = await evaluate_set(teachers[name], each, config.rollout, seed=config.seed)
            metrics |= prefixed(result.metrics(), each.name, teacher=name)
    return metrics
