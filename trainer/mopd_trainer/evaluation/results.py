"""``SetResult``: graded completions of a set, and their metrics."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.evaluation.models import Completion, EvaluatedModel
from mopd_trainer.evaluation.sets import EvaluationSet
from mopd_trainer.evaluation.statistics import pass_at_k, wilson_interval
from mopd_trainer.metrics.step_metrics import Metrics, mean, ratio

#: Metrics whose gap to a teacher is reported -> prefix of ``gap_closed``.
_GAPS = {"accuracy": "", "sampled_accuracy": "sampled_", "bits_per_byte": ""}


@dataclass(frozen=True)
class Graded:
    """A completion after grading."""

    score: float  # from 0 to 1
    tokens: int
    finished: bool


@dataclass(frozen=True)
class SetResult:
    """Results of a model on a set; the fields that were not measured are empty."""

    sources: Sequence[str]  # [prompts]
    greedy: Sequence[Graded] = ()  # [prompts]
    sampled: Sequence[Sequence[Graded]] = ()  # [prompts][samples]
    bits: Sequence[float] = ()  # [prompts], -log2 of the probability of the reference answer
    text_bytes: Sequence[int] = ()  # [prompts], size of the reference answer

    def metrics(self) -> Metrics:
        """Return the metrics of the set, then ``source/<source>/…`` if there are several."""
        metrics = self._of(range(len(self.sources)))
        sources = sorted({*self.sources})
        for source in sources if len(sources) > 1 else ():
            chosen = [at for at, each in enumerate(self.sources) if each == source]
            part = self._of(chosen)
            for name in _GAPS:
                if name in part:
                    metrics[f"source/{source or 'none'}/{name}"] = part[name]
        return metrics

    def _of(self, chosen: Sequence[int]) -> Metrics:
        metrics: Metrics = {}
        if self.bits:
            size = sum(self.text_bytes[at] for at in chosen)
            metrics["bits_per_byte"] = ratio(math.fsum(self.bits[at] for at in chosen), size)
        if self.greedy:
            greedy = [self.greedy[at] for at in chosen]
            metrics |= _accuracy("", [each.score for each in greedy]) | _lengths("", greedy)
        if self.sampled:
            groups = [self.sampled[at] for at in chosen]
            metrics |= _accuracy("sampled_", [mean(g.score for g in group) for group in groups])
            metrics |= _lengths("sampled_", [each for group in groups for each in group])
            metrics |= _passes(groups)
        return metrics


async def evaluate_set(
    model: EvaluatedModel, each: EvaluationSet, rollout: RolloutConfig, *, seed: int
) -> SetResult:
    """Complete and grade the prompts of a set; a function of weights and seed.

    Args:
        rollout: settings that the set does not replace.
    """
    if each.grade is None:
        nats = [
            await model.log_likelihood(prompt, reference)
            for prompt, reference in zip(each.prompts, each.references, strict=True)
        ]
        sizes = [len(reference.encode()) for reference in each.references]
        return SetResult(each.sources, bits=[-n / math.log(2) for n in nats], text_bytes=sizes)
    config = each.config
    sampling = rollout.model_copy(
        update={
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_new_tokens": config.max_new_tokens or rollout.max_new_tokens,
        }
    )
    # A name, not a position: another set does not change the draws of this one.
    position = tuple(each.name.encode())
    greedy: list[Graded] = []
    if config.greedy:
        most_likely = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0})
        greedy = await _graded(model, each, most_likely, seed=0)
    rounds = [
        await _graded(model, each, sampling, seed=derived_seed(seed, 0, number, 0, *position))
        for number in range(config.samples)
    ]
    return SetResult(each.sources, greedy, [*zip(*rounds, strict=True)])


async def _graded(
    model: EvaluatedModel, each: EvaluationSet, settings: RolloutConfig, *, seed: int
) -> list[Graded]:
    completions = await model.complete(each.prompts, settings, seed=seed)
    return await asyncio.to_thread(_grade, each, completions)


def _grade(each: EvaluationSet, completions: Sequence[Completion]) -> list[Graded]:
    assert each.grade is not None
    return [
        Graded(each.grade(prompt, reference, c.text, c.finished), c.tokens, c.finished)
        for prompt, reference, c in zip(each.prompts, each.references, completions, strict=True)
    ]


def gaps_closed(now: Metrics, before: Metrics, teachers: Mapping[str, Metrics]) -> Metrics:
    """Return ``(student - before) / (teacher - before)`` per teacher, as ``gap_closed/<teacher>``.

    NaN where the teacher was not better than the student before the first step.
    """
    gaps: Metrics = {}
    for teacher, reference in teachers.items():
        for name, prefix in _GAPS.items():
            if name in now and name in before and name in reference:
                sign = -1 if name == "bits_per_byte" else 1
                gap = sign * (reference[name] - before[name])
                closed = sign * (now[name] - before[name])
                gaps[f"{prefix}gap_closed/{teacher}"] = closed / gap if gap > 0 else math.nan
    return gaps


def _accuracy(prefix: str, scores: Sequence[float]) -> Metrics:
    """Return the mean score of the prompts and its interval.

    Samples of one prompt are not independent, so that the interval counts prompts.
    """
    share = mean(scores)
    low, high = wilson_interval(share, len(scores))
    names = (f"{prefix}accuracy{end}" for end in ("", "_low", "_high"))
    return dict(zip(names, (share, low, high), strict=True))


def _lengths(prefix: str, graded: Sequence[Graded]) -> Metrics:
    return {
        f"{prefix}tokens_mean": mean(each.tokens for each in graded),
        f"{prefix}finished_share": mean(each.finished for each in graded),
    }


def _passes(groups: Sequence[Sequence[Graded]]) -> Metrics:
    """Return pass@k for powers of two and the number of samples; a score of 1 passes."""
    samples = len(groups[0])
    passed = [sum(each.score == 1 for each in group) for group in groups]
    sizes = sorted({samples, *(2**power for power in range(samples.bit_length()))})
    return {
        f"pass_at_{k}": mean(pass_at_k(samples, count, k) for count in passed)
        for k in sizes
        if samples > 1
    }
