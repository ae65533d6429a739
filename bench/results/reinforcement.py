"""E1: on-policy distillation against SFT and REINFORCE, for growing completions."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from bench.results.claim import Claim, Curves
from bench.results.students import (
    CHAIN,
    PROMPTS_PER_STEP,
    Score,
    Source,
    Subject,
    model_score,
    token_example,
    train,
)
from mopd.demo.tasks import Exercise
from mopd_losses.config import LossConfig, TopKKlConfig
from mopd_losses.core.loss import Loss, LossOutput
from mopd_losses.core.span_targets import SpanLoss, SpanTargets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.sampled.sampled_spans import sampled_spans
from mopd_protocol import Rollout
from mopd_trainer import RolloutConfig, Sampler, TrainingExample

LENGTHS = (4, 16, 64)
#: Arm -> floating-point operations per token and parameter: 2 to sample or to score, 6 to train.
ARMS = {
    "SFT on right completions": 6,
    "SFT on samples of the teacher": 2 + 6,
    "REINFORCE, group baseline": 2 + 6,
    "distillation, forward KL": 2 + 2 + 6,
    "distillation, reverse KL": 2 + 2 + 6,
}
_RIGHT, _SFT, _REINFORCE, _FORWARD, _REVERSE = ARMS
_TEACHER_STEPS, _STEPS, _EVERY, _GROUP, _TOP_K = 300, 60, 2, 8, 16
_RATE, _SHIFT = 1e-3, 10.0
_WARM = 0.1  # share of right samples of the student that all arms begin with


def measure(seeds: int) -> list[Claim]:
    """Train every arm for every length."""
    started = time.process_time()
    # arm -> length -> curve of each seed: work, share of right samples
    curves: dict[str, dict[int, list[list[tuple[float, float]]]]] = {
        arm: {length: [] for length in LENGTHS} for arm in ARMS
    }
    for seed in range(seeds):
        for length in LENGTHS:
            teacher, warm = _teacher(length, seed)
            for arm in ARMS:
                curves[arm][length].append(_curve(arm, length, warm.copy(), teacher, seed))
    shares = {
        (length, seed): _work(curves[_REVERSE][length][seed], curves[_REINFORCE][length][seed])
        for length in LENGTHS
        for seed in range(seeds)
    }
    worst = max(fmean(shares[length, s] for s in range(seeds)) for length in LENGTHS)
    ends = {
        arm: {length: [curve[-1][1] for curve in each] for length, each in by_length.items()}
        for arm, by_length in curves.items()
    }
    gaps = [fmean(ends[_REVERSE][n]) - fmean(ends[_SFT][n]) for n in LENGTHS]
    longest = LENGTHS[-1]
    work = Claim(
        name="E1",
        claim="on-policy distillation reaches the end of REINFORCE with a tenth of its work",
        falsified_if="reverse KL needs more than a tenth of the floating-point work, at any length",
        reproduced=worst <= 0.1,
        columns=tuple(f"right samples, {n} tokens" for n in LENGTHS),
        rows={arm: list(by_length.values()) for arm, by_length in ends.items()}
        | {
            "work of reverse KL up to the end of REINFORCE": [
                [shares[length, seed] for seed in range(seeds)] for length in LENGTHS
            ]
        },
        curves={arm: by_length[longest] for arm, by_length in curves.items()},
        axes=("floating-point operations", f"right samples, {longest} tokens"),
        note="A completion continues three digits, each one more than the third last. All arms "
        f"begin with a student of which at least {_WARM:.0%} of the samples are right (the teacher "
        f"is the same student after {_TEACHER_STEPS} steps on right completions), and train "
        f"{_STEPS} steps of {PROMPTS_PER_STEP} completions; REINFORCE has groups of {_GROUP}, and "
        "reward 1 for a right one. Work is that of sampling, scoring and training, 2, 2 and 6 "
        "operations per token and parameter; the teacher's training is not counted.",
        seconds=time.process_time() - started,
    )
    by_length: Curves = {
        arm: [[(float(n), ends[arm][n][seed]) for n in LENGTHS] for seed in range(seeds)]
        for arm in ARMS
    }
    gap = replace(
        work,
        name="E1b",
        claim="SFT on samples of the teacher ends lower, and the gap grows with their length",
        falsified_if="the gap to reverse KL is not larger for each greater length",
        reproduced=gaps[0] < gaps[1] < gaps[2] and gaps[2] > 0,
        curves=by_length,
        axes=("tokens of a completion", "right samples"),
        rows={arm: work.rows[arm] for arm in (_SFT, _FORWARD, _REVERSE)},
        note="The same runs: " + ", ".join(f"{g:+.1%}" for g in gaps) + " at the three lengths.",
    )
    return [work, gap]


def _teacher(length: int, seed: int) -> tuple[Subject, Subject]:
    """Return the teacher, and its earlier self from which the arms start."""
    subject, warm = Subject.of(seed), list[Subject]()

    def observe(done: int, _: object) -> None:
        if not warm and done % 5 == 0 and subject.accuracies(CHAIN + length)[1] >= _WARM:
            warm.append(subject.copy())

    train(
        subject,
        [CHAIN + length],
        _cross_entropy,
        TopKKlConfig(),
        steps=_TEACHER_STEPS,
        seed=seed,
        source=subject.right,
        observe=observe,
    )
    return subject, warm[0] if warm else subject.copy()


def _curve(
    arm: str, length: int, subject: Subject, teacher: Subject, seed: int
) -> list[tuple[float, float]]:
    """Return the work and the share of right samples during the training of an arm."""
    task, work = CHAIN + length, 0.0
    parameters = subject.student.full_model().num_parameters()
    points = [(0.0, subject.accuracies(task)[1])]
    score, loss, source = _arm(arm, task, subject, teacher, seed)

    def counted(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        nonlocal work
        tokens = sum(len(r.prompt_token_ids) + len(r.completion) for r in rollouts)
        work += tokens * ARMS[arm] * parameters
        return score(items, rollouts)

    def observe(done: int, _: object) -> None:
        if done % _EVERY == 0:
            points.append((work, subject.accuracies(task)[1]))

    train(
        subject,
        [task],
        counted,
        loss,
        steps=_STEPS,
        seed=seed + 100,
        source=source,
        group=_GROUP if arm == _REINFORCE else 1,
        max_new_tokens=length + 1,
        learning_rate=_RATE,
        observe=observe,
    )
    return points


def _arm(
    arm: str, task: int, subject: Subject, teacher: Subject, seed: int
) -> tuple[Score, LossConfig | Loss, Source | None]:
    if arm == _RIGHT:
        return _cross_entropy, TopKKlConfig(), subject.right
    if arm == _SFT:
        config = RolloutConfig(
            prompts_per_step=PROMPTS_PER_STEP, max_new_tokens=task - CHAIN + 1, temperature=1.0
        )
        sampler = Sampler(teacher.student, config, seed=seed + 200)
        return (
            _cross_entropy,
            TopKKlConfig(),
            lambda _, prompts, step: sampler.sample_batch(prompts, step=step, batch=0),
        )
    if arm == _REINFORCE:
        return _advantages(subject), _Reinforce(), None
    divergence = "forward_kl" if arm == _FORWARD else "reverse_kl"
    return model_score({task: teacher}, _TOP_K), TopKKlConfig(divergence=divergence), None


def _cross_entropy(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
    return [token_example(r, item.task) for item, r in zip(items, rollouts, strict=True)]


def _advantages(subject: Subject) -> Score:
    """Return a score whose policy gradient has the advantage of a group's rewards."""

    def score(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        rewards = np.array(
            [
                rollout.completion.token_ids.tolist() == subject.encoder.completion(item)
                for item, rollout in zip(items, rollouts, strict=True)
            ],
            dtype=np.float64,
        ).reshape(-1, _GROUP)
        spread = rewards.std(axis=1, keepdims=True) + 1e-6
        advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).ravel()
        return [
            token_example(rollout, item.task, np.full(len(rollout.completion), advantage - _SHIFT))
            for item, rollout, advantage in zip(items, rollouts, advantages, strict=True)
        ]

    return score


class _Reinforce(SpanLoss):
    """Policy gradient with an advantage per token; scores are advantages minus ``_SHIFT``."""

    def __call__(self, student: StudentLogprobs, targets: SpanTargets) -> LossOutput:
        """See ``Loss``."""
        spans = sampled_spans(student, targets)  # of one token each: both sides have one tokenizer
        values = -(spans.teacher + _SHIFT) * (spans.student - spans.student.detach()).exp()
        return LossOutput(
            student.zeros().index_add(0, spans.starts, values),
            spans.tokens,
            {},
        )


def _work(
    distillation: Sequence[tuple[float, float]], reinforcement: Sequence[tuple[float, float]]
) -> float:
    """Return the share of REINFORCE's work with which distillation reaches its end."""
    target = reinforcement[-1][1]
    reached = next((work for work, share in distillation if share >= target), np.inf)
    return min(reached, 10 * reinforcement[-1][0]) / reinforcement[-1][0]
