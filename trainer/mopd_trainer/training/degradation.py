"""``DegradationMonitor``: warn about a degrading student, and end the run before it is lost.

Text that is not compared costs nothing, so a loss falls when the student generates invalid bytes,
text that is not aligned, or no text; and a loss that compares a part of the teacher's distribution
may lead away from the rest. So the metrics of ``metrics.health``, and the estimated divergence of
the student from each teacher, are compared with their best values of the run.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log, sqrt

import numpy as np

from mopd_trainer.config.degradation import DegradationConfig
from mopd_trainer.metrics.health import COMPARED_SHARE
from mopd_trainer.metrics.step_metrics import Metrics, mean

logger = logging.getLogger(__name__)

INVALID = "rollout/invalid_byte_share"
LENGTH = "rollout/completion_tokens_mean"
END = "rollout/teacher_end_surprisal"
TRUNCATED = "rollout/truncated_share"
ENTROPY = "rollout/entropy_per_byte"
TEACHER_ENTROPY = "rollout/teacher_entropy_per_byte"
DIVERGENCE = "reverse_kl_estimate"  # of each teacher
CONTROL = "control"  # of each teacher that is a control arm
#: Metric -> the metric of the teachers that it is compared with.
_TEACHERS = {LENGTH: END, ENTROPY: TEACHER_ENTROPY}

#: Teachers that give an end of a completion less than this are surprised by it.
_LIKELY_END = 0.1
#: A share of truncated completions above which, and an increase by which, samples do not end.
_TRUNCATED, _INCREASE = 0.5, 0.25
#: Below this entropy, in nats per byte, teachers are sure of the text, and so may the student be.
_UNSURE = 0.02
#: A divergence that is higher by less than this, in nats per token, is not reported.
_LEAST_EXCESS = {"warn": 0.25, "stop": 1.0}

_LEAVING = (
    "The student leaves the text on which the loss is defined, so that the loss falls without "
    "learning"
)
_REASONS = {
    COMPARED_SHARE: _LEAVING,
    INVALID: _LEAVING,
    DIVERGENCE: "The student's samples became less likely under this teacher, which a loss that "
    "compares a part of the text or of the distribution does not show",
    LENGTH: "The student ends completions where the teachers would continue",
    ENTROPY: "The student is certain where the teachers are not",
}
_LOWER = "lower student.learning_rate"


@dataclass(frozen=True)
class Finding:
    """A metric that has degraded."""

    metric: str
    message: str
    advice: str
    is_grave: bool
    sound_steps: int
    """Steps of the run after which the metric had not begun to degrade."""


@dataclass(frozen=True)
class _Mean:
    """A mean over consecutive steps, with bounds of twice its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Mean":
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return cls(mean(values), spread / sqrt(len(values)))

    @property
    def low(self) -> float:
        return self.value - 2 * self.error

    @property
    def high(self) -> float:
        return self.value + 2 * self.error


@dataclass(frozen=True)
class _Window:
    """Means of all metrics over consecutive steps."""

    means: Mapping[str, _Mean]
    last_step: int

    def value(self, key: str) -> float:
        """Return the mean of a metric; 0 if it was not measured."""
        return self.means[key].value if key in self.means else 0.0


class DegradationMonitor:
    """Compare each step's metrics with the best of the run; on rank 0.

    A difference within twice the standard errors of the two means is noise.

    Args:
        past: step (from 1) and metrics of the steps before a resumption, from the journal.
        recommended: every teacher has the loss that 'auto' selects, which is no advice then.
    """

    def __init__(
        self,
        config: DegradationConfig,
        past: Iterable[tuple[int, Metrics]] = (),
        *,
        recommended: bool = False,
    ) -> None:
        self._config = config
        self._recommended = recommended
        self._values: dict[str, list[float]] = defaultdict(list)  # of the last window
        self._best: dict[str, _Window] = {}
        self._sound_steps: dict[str, int] = {}
        self._reported: set[tuple[str, bool]] = set()
        for step, metrics in past:
            self._find(step, metrics)
        self._reported = {(key, False) for key, _ in self._reported}  # a grave one ends each run

    def observe(self, step: int, metrics: Metrics) -> list[Finding]:
        """Return what has degraded at a step (from 1); log the first finding of a metric."""
        known = {key for key, _ in self._reported}
        findings = self._find(step, metrics)
        for finding in findings:
            if finding.metric not in known:
                logger.warning("%s. %s.", finding.message, finding.advice)
        return findings

    def _find(self, step: int, metrics: Metrics) -> list[Finding]:
        watched = (INVALID, TRUNCATED, *_TEACHERS, *_TEACHERS.values())
        size = self._config.window
        for key, value in metrics.items():
            is_watched = key in watched or key.endswith(COMPARED_SHARE)
            if isfinite(value) and (is_watched or _is_divergence(key, metrics)):
                self._values[key] = [*self._values[key], value][-size:]
        # A student may degrade within the first window, so that later means are compared with those
        # of its first half, too.
        begun = {k: _Mean.of(v) for k, v in self._values.items() if size // 2 == len(v) < size}
        self._best |= {key: _Window(begun, step) for key in begun}
        means = {key: _Mean.of(v) for key, v in self._values.items() if len(v) == size}
        now = _Window(means, step)
        teachers = [key for key in means if key.endswith(f"/{COMPARED_SHARE}")]
        unchecked = (TRUNCATED, *_TEACHERS.values(), *(teachers if len(teachers) == 1 else ()))
        findings = [self._check(key, now) for key in means if key not in unchecked]
        return [finding for finding in findings if finding is not None]

    def _check(self, key: str, now: _Window) -> Finding | None:
        sign = -1 if key == INVALID or key.endswith(DIVERGENCE) else 1
        best = self._best.setdefault(key, now)
        if sign * now.value(key) >= sign * best.value(key):
            best = self._best[key] = now
        warns, is_grave = (self._is_below(key, now, best, limit) for limit in ("warn", "stop"))
        if not warns:
            self._sound_steps[key] = now.last_step
            return None
        if (key, is_grave) in self._reported:
            return None
        self._reported |= {(key, is_grave), (key, False)}
        return Finding(
            metric=key,
            message=self._message(key, now, best),
            advice=self._advice(key),
            is_grave=is_grave,
            sound_steps=max(0, self._sound_steps.get(key, 0) - self._config.window),
        )

    def _advice(self, key: str) -> str:
        """Return the reason and what can be changed."""
        reason = next(reason for name, reason in _REASONS.items() if key.endswith(name))
        truncated = mean(self._values.get(TRUNCATED, ()))
        before = self._best[TRUNCATED].value(TRUNCATED) if TRUNCATED in self._best else 0.0
        if truncated > max(_TRUNCATED, before + _INCREASE):
            return (
                f"{reason}. {truncated:.0%} of the completions have no end, {before:.0%} before: "
                "compare the tokens that end completions by `mopd check`, raise "
                f"rollout.max_new_tokens, or {_LOWER}"
            )
        if key.endswith(ENTROPY):
            return f"{reason}. Use divergence 'forward_kl', or {_LOWER}"
        return f"{reason}. " + (
            f"L{_LOWER[1:]}" if self._recommended else f"Use loss 'auto', or {_LOWER}"
        )

    def _is_below(self, key: str, now: _Window, best: _Window, limit: str) -> bool:
        """Return True if a metric is worse than its limit, ``warn`` or ``stop``."""
        config = self._config
        if key == INVALID:
            excess = {"warn": config.warn_invalid_bytes, "stop": config.stop_invalid_bytes}
            return now.means[key].low > 2 * best.means[key].high + excess[limit]
        if key.endswith(DIVERGENCE):
            factor = {"warn": config.warn_divergence, "stop": config.stop_divergence}
            lowest = max(best.means[key].high, 0.0)
            highest = max(factor[limit] * lowest, lowest + _LEAST_EXCESS[limit])
            return now.means[key].low > highest
        value, reference = now.means[key].high, best.means[key].low
        if key == ENTROPY:
            unsure = now.value(TEACHER_ENTROPY)
            certain = value < config.warn_entropy * min(reference, unsure)
            return limit == "warn" and certain and unsure > _UNSURE
        if key == LENGTH:
            share = {"warn": config.warn_length, "stop": config.stop_length}
            surprising = now.value(END) > max(-log(_LIKELY_END), best.value(END))
            return surprising and value < share[limit] * reference
        share = {"warn": config.warn_compared_share, "stop": config.stop_compared_share}
        return value < share[limit] * reference

    def _message(self, key: str, now: _Window, best: _Window) -> str:
        message = f"step {now.last_step}: {key} went from {best.value(key):.3g} "
        message += f"{self._steps(best)} to {now.value(key):.3g} {self._steps(now)}"
        if key in _TEACHERS:
            message += f", {_TEACHERS[key]} {now.value(_TEACHERS[key]):.3g}"
        return message

    def _steps(self, window: _Window) -> str:
        first = max(1, window.last_step - self._config.window + 1)
        return f"(mean of steps {first} to {window.last_step})"


def _is_divergence(key: str, metrics: Metrics) -> bool:
    """Return whether a metric is the divergence from a teacher, and not from a control arm, which
    has nothing to teach."""
    teacher, _, name = key.rpartition("/")
    return name == DIVERGENCE and not metrics.get(f"{teacher}/{CONTROL}")
