"""What a step is measured by. NaN means not measured; 0 means measured as nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_client.transport.counters import Counters
from mopd_losses.core.cross_entropy import IGNORED
from mopd_losses.core.loss_output import LossOutput
from mopd_protocol.samples import Source
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.token_losses import TokenLosses

Metrics = dict[str, float]

#: What became of questions to a teacher, by the names of ``Counters``.
_EVENTS = (
    "retries",
    "failures",
    "breaker_openings",
    "cache_hits",
    "cache_misses",
    "cache_corrupt",
    "cache_unwritten",
    "waits",
    "fallbacks",
)


@dataclass
class LossMeasurements:
    """Collects one teacher's losses over a step's micro-batches."""

    nats: float = 0.0
    shown: dict[int, TokenLosses] = field(default_factory=dict[int, TokenLosses])
    """Number of a shown example -> what its tokens cost."""
    vectors: dict[str, list[NDArray[np.float32]]] = field(
        default_factory=dict[str, list[NDArray[np.float32]]]
    )

    @torch.no_grad()
    def add(self, output: LossOutput) -> None:
        """Takes over a micro-batch's loss, before any weight."""
        self.nats += float(output.per_token.double().sum())
        for name, vector in output.measured.items():
            self.vectors.setdefault(name, []).append(_numpy(vector))

    def merge(self, other: "LossMeasurements") -> None:
        """Takes over what another rank collected."""
        self.nats += other.nats
        self.shown |= other.shown
        for name, parts in other.vectors.items():
            self.vectors.setdefault(name, []).extend(parts)

    def metrics(self) -> Metrics:
        """Means, and the first percentile of the mass that the top-k keeps."""
        joined = {name: np.concatenate(parts) for name, parts in self.vectors.items()}
        found = {f"{name}_mean": mean(values) for name, values in joined.items()}
        if "teacher_mass" in joined:
            found["teacher_mass_p1"] = percentile(joined["teacher_mass"], 1)
        return found


@dataclass
class LabelMeasurements:
    """Collects cross entropy on reference answers over a step's micro-batches."""

    nats: float = 0.0
    tokens: int = 0

    @torch.no_grad()
    def add(self, output: LossOutput, labels: Tensor) -> None:
        """Takes over a micro-batch's loss, before any weight, and its labels [slots]."""
        self.nats += float(output.per_token.double().sum())
        self.tokens += int((labels != IGNORED).sum())

    def metrics(self) -> Metrics:
        """Nats per token of the answers; nothing where there was none."""
        return {"sft/loss_per_token": self.nats / self.tokens} if self.tokens else {}


@dataclass
class StepMeasurements:
    """Collects what a step's micro-batches lose."""

    total: float = 0.0  # with all weights, in nats per token of the step
    teachers: dict[str, LossMeasurements] = field(default_factory=dict[str, LossMeasurements])
    labels: LabelMeasurements = field(default_factory=LabelMeasurements)

    def add(self, other: "StepMeasurements") -> None:
        """Takes over what another rank collected."""
        self.total += other.total
        self.labels.nats += other.labels.nats
        self.labels.tokens += other.labels.tokens
        for name, loss in other.teachers.items():
            self.teachers.setdefault(name, LossMeasurements()).merge(loss)


def teacher_metrics(
    examples: Sequence[TrainingExample],
    losses: Mapping[str, LossMeasurements],
    counters: Mapping[str, Counters],
) -> Metrics:
    """``teacher/<name>/…`` for every teacher of the run."""
    all_tokens = sum(len(example.rollout.completion) for example in examples)
    found: Metrics = {}
    for name, counter in counters.items():
        judged = [(e, j) for e in examples for j in e.judgements if j.teacher == name]
        tokens = sum(len(example.rollout.completion) for example, _ in judged)
        shared = sum(j.weight * len(e.rollout.completion) for e, j in judged)
        own_bytes = sum(len(judgement.view.completion.text) for _, judgement in judged)
        aligned = sum(j.alignment.aligned_bytes(j.view.completion) for _, j in judged)
        loss = losses.get(name, LossMeasurements())
        values = {
            "loss_per_token": ratio(loss.nats, tokens),
            "loss_per_byte": ratio(loss.nats, own_bytes),
            "tokens": float(tokens),
            "token_fraction": ratio(shared, all_tokens),
            "alignment_ratio": ratio(aligned, own_bytes),
            "control_tokens_as_text": float(sum(j.view.control_tokens_as_text for _, j in judged)),
            "invalid_utf8_bytes": float(sum(j.view.invalid_utf8_bytes for _, j in judged)),
            "scored_tokens": float(counter.tokens_scored),
            "received_bytes": float(counter.received_bytes),
            "score_seconds_total": sum(counter.seconds),
            "score_seconds_p50": percentile(counter.seconds, 50),
            "score_seconds_p95": percentile(counter.seconds, 95),
            **{name: float(getattr(counter, name)) for name in _EVENTS},
            **loss.metrics(),
        }
        found |= {f"teacher/{name}/{key}": value for key, value in values.items()}
    return found


def of_source(examples: Sequence[TrainingExample], source: Source) -> list[TrainingExample]:
    """The examples whose completions come from there."""
    return [example for example in examples if example.rollout.source == source]


def answer_metrics(examples: Sequence[TrainingExample]) -> Metrics:
    """What was learnt from the data's answers."""
    lengths = [len(example.rollout.completion) for example in of_source(examples, "answers")]
    return {
        "answers/samples": float(len(lengths)),
        "answers/tokens": float(sum(lengths)),
        "answers/completion_tokens_mean": mean(lengths),
    }


def rollout_metrics(examples: Sequence[TrainingExample], *, step: int) -> Metrics:
    """What the student wrote."""
    rollouts = [example.rollout for example in of_source(examples, "rollout")]
    finished = [rollout.finish_reason == "stop" for rollout in rollouts]
    ages = [step - rollout.policy_version for rollout in rollouts]
    return {
        "rollout/samples": float(len(rollouts)),
        "rollout/tokens": float(sum(len(rollout.completion) for rollout in rollouts)),
        "rollout/completion_tokens_mean": mean([len(r.completion) for r in rollouts]),
        "rollout/finished_share": mean(finished),
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages, default=float("nan"))),
    }


def mean(values: Iterable[float]) -> float:
    """The mean, NaN of nothing."""
    array = np.asarray(list(values), dtype=np.float64)
    return float(array.mean()) if len(array) else float("nan")


def percentile(values: Sequence[float] | NDArray[np.float32], q: float) -> float:
    """A percentile, NaN of nothing."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def ratio(numerator: float, denominator: float) -> float:
    """A quotient, NaN over nothing."""
    return numerator / denominator if denominator else float("nan")


def _numpy(vector: Tensor) -> NDArray[np.float32]:
    return vector.detach().float().cpu().numpy()
