"""E6: the teacher teaches. The right teacher and three that have nothing to teach."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from bench.results.claim import Claim, Curves
from bench.results.students import Score, Subject, exercise, table_score, teacher_name, train
from mopd.demo.tasks import Exercise
from mopd_losses.config import PolicyGradientConfig, TopKKlConfig
from mopd_protocol import Rollout
from mopd_trainer import TrainingExample
from mopd_trainer.teachers.control import Controls

ARMS = ("right", "random", "shuffled", "constant_negative")
_TASK, _STEPS, _WARM_STEPS, _EVERY = 0, 160, 40, 20


def measure(seeds: int) -> list[Claim]:
    """Train every arm from the same warm student, on its own samples."""
    started = time.process_time()
    curves: Curves = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        warm = Subject.of(seed)
        score, loss = table_score(warm), TopKKlConfig()
        train(warm, [_TASK], score, loss, steps=_WARM_STEPS, seed=seed, source=warm.right)
        for arm in ARMS:
            curves[arm].append(_curve(arm, warm.copy(), seed))
    ends = {arm: [curve[-1][1] for curve in each] for arm, each in curves.items()}
    before = fmean(curve[0][1] for curve in curves["right"])
    best_control = max(fmean(ends[arm]) for arm in ARMS[1:])
    claim = Claim(
        name="E6",
        claim="the teacher teaches: with the same budget, control arms do not",
        falsified_if="a control arm gains half of what the right teacher gains",
        reproduced=best_control - before < (fmean(ends["right"]) - before) / 2,
        columns=("accuracy before", "accuracy after"),
        rows={a: [[c[0][1] for c in curves[a]], ends[a]] for a in ARMS},
        curves=curves,
        axes=("steps", "accuracy"),
        note="Sums of two digits; student after 40 steps on right completions, then 160 steps of "
        "32 samples, `topk_kl` forward KL on the teacher's top 4.",
        seconds=time.process_time() - started,
    )
    return [claim]


def _curve(arm: str, subject: Subject, seed: int) -> list[tuple[float, float]]:
    points = [(0.0, subject.accuracy(_TASK))]

    def observe(done: int, _: object) -> None:
        if done % _EVERY == 0:
            points.append((float(done), subject.accuracy(_TASK)))

    loss = PolicyGradientConfig() if arm == "constant_negative" else TopKKlConfig()
    score = table_score(subject) if arm == "right" else _control(arm, subject, seed)
    train(subject, [_TASK], score, loss, steps=_STEPS, seed=seed, observe=observe)
    return points


def _control(arm: str, subject: Subject, seed: int) -> Score:
    draw, table = random.Random(seed + 1_000), table_score(subject)
    controls = Controls({teacher_name(_TASK): arm}, seed) if arm != "shuffled" else Controls()

    def score(items: Sequence[Exercise], rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        if arm == "shuffled":
            return table([_other(item, draw) for item in items], rollouts)
        examples = table(items, rollouts)
        own = subject.student.table
        return [
            replace(e, scores=(controls.aligned(e.scores[0], rollout, own),))
            for e, rollout in zip(examples, rollouts, strict=True)
        ]

    return score


def _other(item: Exercise, draw: random.Random) -> Exercise:
    other = item
    while other.prompt == item.prompt:
        other = exercise(_TASK, draw)
    return other
