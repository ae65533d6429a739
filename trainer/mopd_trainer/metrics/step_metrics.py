"""Metrics of a step. NaN means not measured; 0 means measured as zero. Names: ``table``."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_client.transport.counters import Counters
from mopd_losses.core.cross_entropy import IGNORED
from mopd_losses.core.loss import LossOutput
from mopd_protocol.samples import Source
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.copied_text import copied_share
from mopd_trainer.metrics.distributions import sampled_nats, teacher_distribution_metrics
from mopd_trainer.metrics.token_losses import TokenLosses

Metrics = dict[str, float]

#: Names of ``Counters`` that are metrics of a teacher.
COUNTED = (
    "retries",
    "failures",
    "breaker_openings",
    "rejected_replicas",
    "cache_hits",
    "cache_misses",
    "cache_corrupt",
    "cache_unwritten",
    "waits",
    "fallbacks",
)


@dataclass
class LossMeasurements:
    """One teacher's losses over the micro-batches of a step."""

    nats: float = 0.0
    compared: float = 0.0
    """Tokens that are compared with the teacher; a part of one may be."""
    importance: float = 0.0
    """Sum of the importance weights."""
    per_example: dict[int, TokenLosses] = field(default_factory=dict[int, TokenLosses])
    """Index of the example in the step -> loss of each token."""
    vectors: dict[str, list[NDArray[np.float32]]] = field(
        default_factory=dict[str, list[NDArray[np.float32]]]
    )

    @torch.no_grad()
    def add(self, output: LossOutput, importance: Tensor) -> None:
        """Add the unweighted loss of a micro-batch, and its importance weights [slots], which are
        zero where no token is selected."""
        selected = importance.to(output.per_token.device) > 0
        self.nats += float(output.per_token.double().where(selected, 0.0).sum())
        self.compared += float(output.compared.double().where(selected, 0.0).sum())
        self.importance += float(importance.double().sum())
        for name, vector in output.measured.items():
            self.vectors.setdefault(name, []).append(vector.detach().float().cpu().numpy())

    def merge(self, other: "LossMeasurements") -> None:
        """Add the measurements of another rank."""
        self.nats += other.nats
        self.compared += other.compared
        self.importance += other.importance
        self.per_example |= other.per_example
        for name, parts in other.vectors.items():
            self.vectors.setdefault(name, []).extend(parts)

    def metrics(self) -> Metrics:
        """Return the mean of each vector."""
        return {f"{name}_mean": mean(np.concatenate(parts)) for name, parts in self.vectors.items()}


@dataclass
class LabelMeasurements:
    """Cross entropy on reference answers over the micro-batches of a step."""

    nats: float = 0.0
    tokens: int = 0

    @torch.no_grad()
    def add(self, output: LossOutput, labels: Tensor) -> None:
        """Add the unweighted loss of a micro-batch with its labels [slots]."""
        self.nats += float(output.per_token.double().sum())
        self.tokens += int((labels != IGNORED).sum())

    def metrics(self) -> Metrics:
        """Return nats per token of the reference answers; no metric without any."""
        return {"sft/loss_per_token": self.nats / self.tokens} if self.tokens else {}


@dataclass
class RewardMeasurements:
    """Importance ratios of the tokens with an advantage over the micro-batches of a step."""

    tokens: int = 0
    clipped: float = 0.0
    ratios: float = 0.0

    @torch.no_grad()
    def add(self, output: LossOutput) -> None:
        """Add the reward term of a micro-batch."""
        self.tokens += len(output.measured["clipped"])
        self.clipped += float(output.measured["clipped"].double().sum())
        self.ratios += float(output.measured["importance_ratio"].double().sum())

    def merge(self, other: "RewardMeasurements") -> None:
        """Add the measurements of another rank."""
        self.tokens += other.tokens
        self.clipped += other.clipped
        self.ratios += other.ratios

    def metrics(self) -> Metrics:
        """Return the share of clipped ratios, and their mean; no metric without any."""
        if not self.tokens:
            return {}
        return {
            "reinforcement/clipped_share": self.clipped / self.tokens,
            "reinforcement/importance_ratio_mean": self.ratios / self.tokens,
        }


@dataclass
class StepMeasurements:
    """Losses of the micro-batches of a step."""

    total: float = 0.0  # what the update minimises, in nats
    nats: float = 0.0  # the same without importance weights
    compared: float = 0.0  # share of the step's tokens that are compared, with the same weights
    teachers: dict[str, LossMeasurements] = field(default_factory=dict[str, LossMeasurements])
    labels: LabelMeasurements = field(default_factory=LabelMeasurements)
    rewards: RewardMeasurements = field(default_factory=RewardMeasurements)
    is_compared: bool = False
    """True if any token has a teacher or a label."""

    @torch.no_grad()
    def add(self, output: LossOutput, weights: Tensor, factor: float = 1.0) -> None:
        """Add a loss of a micro-batch, and its compared tokens.

        Args:
            weights: [slots], of the loss; those of a step sum to one for a factor of one.
            factor: of the loss, which changes its share in the step's but not what is compared.
        """
        weights = weights.double()
        self.is_compared |= bool(weights.any())
        self.nats += float((output.per_token.double() * weights).sum())
        self.compared += float((output.compared.double() * weights).sum()) / factor

    def merge(self, other: "StepMeasurements") -> None:
        """Add the measurements of another rank."""
        self.total += other.total
        self.nats += other.nats
        self.compared += other.compared
        self.labels.nats += other.labels.nats
        self.labels.tokens += other.labels.tokens
        self.rewards.merge(other.rewards)
        self.is_compared |= other.is_compared
        for name, loss in other.teachers.items():
            self.teachers.setdefault(name, LossMeasurements()).merge(loss)

    def metrics(self) -> Metrics:
        """Return the loss of the run."""
        return {
            "loss": ratio(self.nats, self.compared),
            "compared_share": self.compared if self.is_compared else math.nan,
            "objective": self.total,
            **self.labels.metrics(),
            **self.rewards.metrics(),
        }


def teacher_metrics(
    examples: Sequence[TrainingExample],
    losses: Mapping[str, LossMeasurements],
    counters: Mapping[str, Counters],
    vocabularies: Mapping[str, int],
    *,
    temperature: float = 1.0,
) -> Metrics:
    """Return ``teacher/<name>/…`` for every teacher of the run.

    Args:
        vocabularies: number of ids of each teacher.
        temperature: of the samples.
    """
    all_tokens = sum(len(example.rollout.completion) for example in examples)
    metrics: Metrics = {}
    for name, counter in counters.items():
        scored = [(e, score) for e in examples for score in e.scores if score.teacher == name]
        inputs = [score.teacher_input for _, score in scored]
        selected = [s.selected_tokens(len(e.rollout.completion)) for e, s in scored]
        tokens = sum(selected)
        weighted_tokens = sum(s.weight * n for (_, s), n in zip(scored, selected, strict=True))
        text_bytes = sum(len(each.completion.text) for each in inputs)
        aligned_bytes = sum(
            score.alignment.aligned_bytes(score.teacher_input.completion) for _, score in scored
        )
        loss = losses.get(name, LossMeasurements())
        values = {
            "loss": ratio(loss.nats, loss.compared),
            "compared_share": ratio(loss.compared, tokens),
            "loss_per_token": ratio(loss.nats, tokens),
            "loss_per_byte": ratio(loss.nats, text_bytes),
            "importance_weight_mean": ratio(loss.importance, tokens),
            "tokens": float(tokens),
            "token_fraction": ratio(weighted_tokens, all_tokens),
            **teacher_distribution_metrics(
                scored, vocabulary=vocabularies[name], temperature=temperature
            ),
            "alignment_ratio": ratio(aligned_bytes, text_bytes),
            "control_tokens_as_text": float(sum(each.control_tokens_as_text for each in inputs)),
            "invalid_utf8_bytes": float(sum(each.invalid_utf8_bytes for each in inputs)),
            "lookaheads": float(sum(len(score.lookaheads or ()) for _, score in scored)),
            "scored_tokens": float(counter.tokens_scored),
            "received_bytes": float(counter.received_bytes),
            "score_seconds_total": sum(counter.seconds),
            "score_seconds_p50": percentile(counter.seconds, 50),
            "score_seconds_p95": percentile(counter.seconds, 95),
            **{name: float(getattr(counter, name)) for name in COUNTED},
            **_replica_metrics(counter),
            **loss.metrics(),
        }
        sampled = of_source([example for example, _ in scored], "rollout")
        copied = copied_share([example.rollout for example in sampled], name)
        values |= {} if copied is None else {"copied_share": copied}
        metrics |= {f"teacher/{name}/{key}": value for key, value in values.items()}
    return metrics


def _replica_metrics(counter: Counters) -> Metrics:
    """Return how evenly several replicas were used; nothing for one."""
    tokens = [replica.tokens for replica in counter.replicas.values()]
    if len(tokens) < 2:
        return {}
    return {
        "replicas": float(len(tokens)),
        "busiest_replica": ratio(max(tokens) * len(tokens), sum(tokens)),
    }


def of_source(examples: Sequence[TrainingExample], source: Source) -> list[TrainingExample]:
    """Return the examples whose completions are of this source."""
    return [example for example in examples if example.rollout.source == source]


def reference_answer_metrics(examples: Sequence[TrainingExample]) -> Metrics:
    """Return ``answers/…``, of the data's reference answers."""
    lengths = [len(example.rollout.completion) for example in of_source(examples, "answers")]
    return {
        "answers/samples": float(len(lengths)),
        "answers/tokens": float(sum(lengths)),
        "answers/completion_tokens_mean": mean(lengths),
    }


def rollout_metrics(
    examples: Sequence[TrainingExample], *, step: int, truncated: float = 0.0
) -> Metrics:
    """Return ``rollout/…`` and ``staleness/…``, of the sampled completions.

    Args:
        truncated: completions that were dropped because they have no end; they count in the
            finished and truncated shares.
    """
    rollouts = [example.rollout for example in of_source(examples, "rollout")]
    lengths = [len(rollout.completion) for rollout in rollouts]
    finished = [rollout.finish_reason == "stop" for rollout in rollouts]
    finished_share = ratio(float(sum(finished)), len(finished) + truncated)
    ages = [step - rollout.policy_version for rollout in rollouts]
    return {
        "rollout/samples": float(len(rollouts)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/completion_tokens_mean": mean(lengths),
        "rollout/completion_tokens_min": percentile(lengths, 0),
        "rollout/completion_tokens_p50": percentile(lengths, 50),
        "rollout/completion_tokens_p95": percentile(lengths, 95),
        "rollout/completion_tokens_max": percentile(lengths, 100),
        "rollout/entropy": -ratio(math.fsum(sampled_nats(r) for r in rollouts), sum(lengths)),
        "rollout/corrected_share": mean(bool(each.corrected_tokens) for each in rollouts),
        "rollout/finished_share": finished_share,
        "rollout/truncated_share": 1 - finished_share,
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages, default=float("nan"))),
    }


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN without values."""
    array = np.asarray(list(values), dtype=np.float64)
    return float(array.mean()) if len(array) else float("nan")


def percentile(values: Sequence[float] | NDArray[np.float32], q: float) -> float:
    """Return a percentile; NaN without values."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def ratio(numerator: float, denominator: float) -> float:
    """Return a quotient; NaN for a denominator of zero."""
    return numerator / denominator if denominator else float("nan")
