"""Weights of the tokens of a step in the average of its loss: ``loss_average``.

With ``w(i, t)`` the share of teacher ``t`` in sample ``i``, of which it scores ``n(i, t)`` selected
tokens (all, without ``tokens``), each selected token has for the loss of the teacher the weight

    tokens      w(i, t) / sum over j, u of w(j, u) n(j, u)           every token counts the same
    samples     w(i, t) / (samples * n(i, t))                        every sample counts the same
    teachers    w(i, t) / (teachers * sum over j of w(j, t) n(j, t)) every teacher counts the same

and cross entropy the sum over the teachers. All weights of a step sum to one over selected tokens
and teachers: what is not selected does not dilute the rest. If ``distill`` excludes completions
with an advantage, they count with a loss of zero, and the sum is the share of the others in the
tokens or, with ``samples``, in the completions: otherwise the fewer are distilled, the more each of
them would weigh against its reward. The reward term has a separate average, over the tokens of the
completions with an advantage or, with ``samples``, over these completions. Weights depend on the
complete step and are computed once, before it is split: so the gradient depends neither on
micro-batches nor on ranks.
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
    reward: float = 0.0
    """Weight of the reward term; 0 without an advantage."""


def sample_weights(
    examples: Sequence[TrainingExample], average: LossAverage
) -> list[SampleWeights]:
    """Return the weights of each sample of a step."""
    tokens = sum(len(example.rollout.completion) for example in examples)
    parts = [_parts(example) for example in examples]
    sizes = [_tokens(each) for each in parts]
    distilled, samples = sum(sizes), sum(size > 0 for size in sizes)
    by_teacher: dict[str, float] = {}
    for each in parts:
        for name, (share, count) in each.items():
            by_teacher[name] = by_teacher.get(name, 0.0) + share * count
    rewarded = [len(e.rollout.completion) for e in examples if e.advantage is not None]
    kept = _distilled_share(examples, average)
    weights: list[SampleWeights] = []
    for example, each in zip(examples, parts, strict=True):
        factors = {name: tokens / distilled for name, (_, count) in each.items() if count}
        if average == "samples":
            factors = {name: tokens / (samples * each[name][1]) for name in factors}
        elif average == "teachers":
            factors = {name: tokens / (len(by_teacher) * by_teacher[name]) for name in factors}
        factors = {name: factor * kept for name, factor in factors.items()}
        weighted = {name: each[name][0] * factors.get(name, 0.0) for name in each}
        labels = max(factors.values(), default=0.0)
        labels = labels if average == "tokens" else sum(weighted.values())
        reward, length = 0.0, len(example.rollout.completion)
        if example.advantage is not None and length:
            equal = average == "samples"
            reward = tokens / (sum(map(bool, rewarded)) * length if equal else sum(rewarded))
        weights.append(SampleWeights(weighted, labels, reward))
    return weights


def _distilled_share(examples: Sequence[TrainingExample], average: LossAverage) -> float:
    """Return the share of what is distilled, the rest being excluded by ``distill``."""

    def size(chosen: Sequence[TrainingExample]) -> int:
        if average == "samples":
            return len(chosen)
        return sum(len(each.rollout.completion) for each in chosen)

    distilled = size([each for each in examples if each.scores])
    excluded = size([e for e in examples if not e.scores and e.advantage is not None])
    return distilled / (distilled + excluded) if distilled else 1.0


def _parts(example: TrainingExample) -> dict[str, tuple[float, int]]:
    """Return the share and the selected tokens of each teacher of a sample."""
    length = len(example.rollout.completion)
    if not example.scores and example.rollout.source != "rollout":
        return {_NONE: (1.0, length)}
    return {
        score.teacher: (score.weight, score.selected_tokens(length)) for score in example.scores
    }


def _tokens(parts: Mapping[str, tuple[float, int]]) -> float:
    """Return the tokens of a sample, each divided among its teachers."""
    counts = {count for _, count in parts.values()}
    if len(counts) == 1:  # exact: the shares sum to one
        return counts.pop()
    return sum(share * count for share, count in parts.values())
