"""Metrics of the samples that show a degrading student: see ``training.degradation``.

A loss falls while the student leaves what the loss compares; these metrics do not.
"""

from collections.abc import Sequence

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.distributions import known_entropy, sampled_nats
from mopd_trainer.metrics.step_metrics import Metrics, mean, of_source, ratio

COMPARED_SHARE = "compared_share"


def health_metrics(
    examples: Sequence[TrainingExample], metrics: Metrics, *, temperature: float
) -> Metrics:
    """Return all compared shares with the dropped samples, and metrics of the sampled text.

    Args:
        temperature: of the samples; entropies of student and teachers are of distributions at it.
        metrics: of the step; its compared shares are of the examples only. A sample that was
            dropped because nothing is aligned counts as not compared, with the mean length.
    """
    shares = {key: value for key, value in metrics.items() if key.endswith(COMPARED_SHARE)}
    for key, share in shares.items():
        teacher = key.removesuffix(COMPARED_SHARE).removeprefix("teacher").strip("/")
        kept = sum(not teacher or _is_scored(example, teacher) for example in examples)
        unaligned = [
            samples
            for reason, samples in metrics.items()
            if reason.endswith(f"{teacher}/nothing_aligned") and reason.startswith("dropped/")
        ]
        # Two teachers may drop the same sample.
        lost = min(sum(unaligned), metrics.get("dropped/total", 0.0))
        if lost:
            shares[key] = share * kept / (kept + lost) if kept else 0.0
    return shares | _text_metrics(of_source(examples, "rollout"), temperature)


def _is_scored(example: TrainingExample, teacher: str) -> bool:
    return any(score.teacher == teacher for score in example.scores)


def _text_metrics(examples: Sequence[TrainingExample], temperature: float) -> Metrics:
    rollouts = [example.rollout for example in examples]
    text_bytes = sum(len(rollout.completion.text) for rollout in rollouts)
    entropies = [-sampled_nats(r) for r in rollouts if r.sampled_logprobs is not None]
    scores = [score for example in examples for score in example.scores]
    entropy_sums = [float(known_entropy(s.score.topk, temperature).sum()) for s in scores]
    scored_bytes = sum(len(score.score.completion.text) for score in scores)
    return {
        "rollout/invalid_byte_share": ratio(
            sum(each.invalid_bytes for each in rollouts), text_bytes
        ),
        "rollout/entropy_per_byte": ratio(sum(entropies), text_bytes),
        "rollout/teacher_entropy_per_byte": ratio(sum(entropy_sums), scored_bytes),
        "rollout/teacher_end_surprisal": mean(
            -float(s.score.logprobs[-1]) for s in scores if s.score.completion.ends_turn
        ),
    }
