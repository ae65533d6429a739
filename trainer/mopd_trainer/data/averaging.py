"""Weights of the tokens of a step in the average of its loss: ``loss_average``.

With ``w(i, t)`` the share of teacher ``t`` in sample ``i`` of ``n(i)`` tokens, each token
of the sample has for the loss of the teacher the weight

    tokens      w(i, t) / sum of n                          every token counts the same
    samples     w(i, t) / (samples * n(i))                  every sample counts the same
    teachers    w(i, t) / (teachers * sum over j of w(j, t) n(j))    every teacher counts the same

and cross entropy the sum over the teachers. All weights of a step sum to one over tokens and
teachers. They depend on the complete step and are computed once, before it is split: so the
gradient depends neither on micro-batches nor on ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mopd_trainer.config.settings import LossAverage
from mopd_trainer.data.examples import TrainingExample

#: The teacher of samples without a score, in plain SFT.
_NONE = ""


@dataclass(frozen=True)
class SampleWeights:
    """Weights of each token of a sample, times the tokens of the step."""

    teachers: Mapping[str, float]
    labels: float
    """Weight of cross entropy: the sum over the teachers."""


def sample_weights(
    examples: Sequence[TrainingExample], average: LossAverage
) -> list[SampleWeights]:
    """Return the weights of each sample of a step."""
    lengths = [len(example.rollout.completion) for example in examples]
    shares = [{s.teacher: s.weight for s in e.scores} or {_NONE: 1.0} for e in examples]
    tokens, samples = sum(lengths), sum(length > 0 for length in lengths)
    by_teacher: dict[str, float] = {}
    for length, each in zip(lengths, shares, strict=True):
        for name, share in each.items():
            by_teacher[name] = by_teacher.get(name, 0.0) + share * length
    weights: list[SampleWeights] = []
    for length, each in zip(lengths, shares, strict=True):
        factors = dict.fromkeys(each, 1.0)
        if average == "samples" and length:
            factors = dict.fromkeys(each, tokens / (samples * length))
        elif average == "teachers" and length:
            factors = {name: tokens / (len(by_teacher) * by_teacher[name]) for name in each}
        weighted = {name: share * factors[name] for name, share in each.items()}
        labels = 1.0 if average == "tokens" else sum(weighted.values())
        weights.append(SampleWeights(weighted, labels))
    return weights
