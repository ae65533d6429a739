"""``sample_metrics``: the samples of a step, for the journal and ``DegradationMonitor``."""

from collections.abc import Mapping, Sequence

from mopd_client.transport.counters import Counters
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.health import health_metrics
from mopd_trainer.metrics.step_metrics import (
    LossMeasurements,
    Metrics,
    rollout_metrics,
    teacher_metrics,
)


def sample_metrics(
    examples: Sequence[TrainingExample],
    metrics: Metrics,
    losses: Mapping[str, LossMeasurements],
    counters: Mapping[str, Counters],
    vocabularies: Mapping[str, int],
    *,
    step: int,
    temperature: float,
) -> Metrics:
    """Return ``rollout/…`` and ``teacher/…``, and all compared shares with the dropped samples.

    Args:
        metrics: of the update and the dropped samples.
        losses: of the update, by teacher.
        counters: of each teacher's client, in this step.
        vocabularies: number of ids of each teacher.
        step: counted from 0.
        temperature: of the samples.
    """
    truncated = metrics.get("dropped/truncated", 0.0)
    rollouts = rollout_metrics(examples, step=step, truncated=truncated)
    teachers = teacher_metrics(examples, losses, counters, vocabularies, temperature=temperature)
    health = health_metrics(examples, metrics | teachers, temperature=temperature)
    return rollouts | teachers | health
