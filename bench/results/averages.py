"""E4: averages over teachers with short and with long completions.

Each teacher has the same number of prompts in a step; half of them have completions of 2 or 3
tokens, half of 42 to 57. A student from random weights is trained on right completions.
"""

import time
from itertools import product
from statistics import fmean
from typing import get_args

from bench.results.claim import Claim, Curves
from bench.results.students import Subject, table_score, train
from mopd_losses.config import TopKKlConfig
from mopd_trainer.config.settings import LossAverage

AVERAGES: tuple[LossAverage, ...] = get_args(LossAverage)
TEACHERS = (2, 8)
_STEPS, _EVERY, _PROMPTS = 150, 30, 40


def measure(seeds: int) -> list[Claim]:
    """Train a student for every average and number of teachers."""
    started = time.process_time()
    rows: dict[str, list[list[float]]] = {}
    curves: Curves = {}
    for teachers, average in product(TEACHERS, AVERAGES):
        runs = [_run(teachers, average, s) for s in range(seeds)]
        name = f"{teachers} teachers, {average}"
        rows[name] = [[run[-1][kind] for run in runs] for kind in (1, 2)]
        curves[f"{name}: short"] = [[(step, short) for step, short, _ in run] for run in runs]
    gaps = {
        teachers: fmean(rows[f"{teachers} teachers, samples"][0])
        - fmean(rows[f"{teachers} teachers, tokens"][0])
        for teachers in TEACHERS
    }
    claim = Claim(
        name="E4",
        claim="the token budget decides between teachers: by tokens, short tasks starve",
        falsified_if="short tasks are not ten points better by samples than by tokens, at 20 : 1 "
        "tokens and any number of teachers",
        reproduced=min(gaps.values()) > 0.1,
        columns=("short tasks", "long tasks"),
        rows=rows,
        curves=curves,
        axes=("steps", "accuracy of short tasks"),
        note=f"Greedy accuracy on {_PROMPTS} prompts of each teacher after {_STEPS} steps of 32 "
        "right completions, scored by the teachers. Students of eight teachers have then learned "
        "little with any average.",
        seconds=time.process_time() - started,
    )
    return [claim]


def _run(teachers: int, average: LossAverage, seed: int) -> list[tuple[float, float, float]]:
    """Return steps and the accuracy of short and of long tasks."""
    subject, tasks, points = Subject.of(seed), range(teachers), list[tuple[float, float, float]]()

    def observe(done: int, _: object) -> None:
        if done % _EVERY == 0:
            accuracies = [subject.accuracy(task, _PROMPTS) for task in tasks]
            points.append((float(done), fmean(accuracies[::2]), fmean(accuracies[1::2])))

    train(
        subject,
        tasks,
        table_score(subject),
        TopKKlConfig(),
        steps=_STEPS,
        seed=seed,
        source=subject.right,
        average=average,
        observe=observe,
    )
    return points
