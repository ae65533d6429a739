"""Warm starts: training on reference answers until a share of held-out prompts is completed.

A fixed number of steps leaves one seed's student at 0.5 % and another's at 17 %: a task is learned
suddenly. So the student is evaluated every few steps. If it completes too much, the steps since the
last evaluation are made again at half the learning rate.

Several tasks are trained one after the other, or at once; a task that is completed enough then gets
few examples, and one that is completed too much none.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from mopd.demo.examples import IGNORED, Encoder, supervised_batch
from mopd.demo.tasks import Exercise
from mopd.demo.training import optimizer_of, supervised_step
from mopd_protocol import TrainingError

if TYPE_CHECKING:
    from bench.numerals.exercises import Task

_EVALUATE_EVERY = 5
_EVALUATE_EVERY_AT_ONCE = 2
#: Weight of a task that is completed enough, and growth of a lowered learning rate.
_ENOUGH, _GROWTH = 0.02, 2**0.25
_WARM_UP_STEPS = 20
_LOWEST_FACTOR = 1 / 64


@dataclass(frozen=True)
class Completion:
    """Range of the share of each task's held-out prompts that a warm student completes."""

    tasks: tuple["Task", ...]
    """The slowest first: a task is trained, too, once that before it has been in the middle."""
    least: float = 0.1
    most: float = 0.2
    at_once: bool = False
    """Train all tasks from the first step."""


@torch.no_grad()
def completed_share(
    model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]
) -> float:
    """Return the share of exercises of which greedy decoding gives the reference answer's tokens.

    In one pass: each token is the likeliest one behind those before it.
    """
    batch = supervised_batch(encoder, exercises, 0.0, Random(0))
    logits: Tensor = model(input_ids=batch.token_ids, attention_mask=batch.attention).logits
    labels = batch.labels[:, 1:]
    right = (logits[:, :-1].argmax(dim=2) == labels) | (labels == IGNORED)
    return right.all(dim=1).float().mean().item()


def train_until(
    model: PreTrainedModel,
    encoder: Encoder,
    completion: Completion,
    *,
    seed: int,
    steps: int,
    examples_per_step: int,
    learning_rate: float,
    report: Callable[[int, int], None],
) -> list[float]:
    """Train until every task's share is in the range; return the shares.

    Args:
        steps: the most, those made again included.
        report: steps done, steps in all.

    Raises:
        TrainingError: if the range is not reached in ``steps``, or left in one jump at any
            learning rate.
    """
    random, factor = Random(seed), 1.0
    optimizer = optimizer_of(model, learning_rate)
    known = [task.training(seed) for task in completion.tasks]
    held_out = [task.held_out() for task in completion.tasks]
    shares, kept = [0.0], _state(model, optimizer, random)
    shown = 1
    weights = [1.0] * len(known)
    every = _EVALUATE_EVERY_AT_ONCE if completion.at_once else _EVALUATE_EVERY

    def drawn_task() -> Sequence[Exercise]:
        if completion.at_once:
            return random.choices(known, weights)[0]
        return random.choice(known[:shown])

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor * min(1.0, (step + 1) / _WARM_UP_STEPS)
        exercises = [random.choice(drawn_task()) for _ in range(examples_per_step)]
        supervised_step(model, optimizer, supervised_batch(encoder, exercises, 0.0, Random(0)))
        report(step + 1, steps)
        if (step + 1) % every:
            continue
        measured = [completed_share(model, encoder, each) for each in held_out]
        if max(measured) > completion.most:
            factor /= 2
            if factor < _LOWEST_FACTOR:
                raise _error(measured, completion, "in one jump at any learning rate")
            _restore(kept, model, optimizer, random)
            if completion.at_once:
                weights = [float(share < max(measured)) for share in measured]
            continue
        shares, kept = measured, _state(model, optimizer, random)
        if min(shares) >= completion.least:
            report(steps, steps)
            return shares
        if completion.at_once:
            factor = min(1.0, factor * _GROWTH)
            weights = [
                (completion.most - share) / completion.most if share < completion.least else _ENOUGH
                for share in shares
            ]
        elif shown < len(known) and shares[shown - 1] >= (completion.least + completion.most) / 2:
            shown += 1
    raise _error(shares, completion, f"after {steps} steps")


def _state(model: PreTrainedModel, optimizer: AdamW, random: Random) -> tuple[Any, ...]:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), random.getstate()))


def _restore(
    state: tuple[Any, ...], model: PreTrainedModel, optimizer: AdamW, random: Random
) -> None:
    weights, moments, drawn = copy.deepcopy(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    random.setstate(drawn)


def _error(shares: Sequence[float], completion: Completion, when: str) -> TrainingError:
    listed = ", ".join(f"{share:.1%}" for share in shares)
    return TrainingError(
        f"warm start: held-out prompts completed are out of range {when} (found {listed}, expected "
        f"{completion.least:.0%} to {completion.most:.0%} of each task). Change the student's "
        "steps or its learning rate.",
        key="steps",
    )
