"""Supervised training of one small model."""

import math
from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from mopd.demo.examples import IGNORED, Batch, Encoder, supervised_batch
from mopd.demo.recipes import Curriculum, Recipe
from mopd.demo.tasks import TASKS, Exercise, draw_training, with_random_completion

_WARM_UP_STEPS = 40
_MAX_GRADIENT_NORM = 1.0


def training_losses(model: PreTrainedModel, encoder: Encoder, recipe: Recipe) -> Iterator[float]:
    """Train ``model`` and yield the loss of each step in nats per trained token."""
    random = Random(recipe.seed)

    def batch() -> Batch:
        exercises = [_draw(recipe.curriculum, random) for _ in range(recipe.examples_per_step)]
        return supervised_batch(encoder, exercises, recipe.corruption, random)

    return supervised_losses(model, batch, recipe.steps, recipe.learning_rate)


def supervised_losses(
    model: PreTrainedModel, batch: Callable[[], Batch], steps: int, learning_rate: float
) -> Iterator[float]:
    """Train on a new batch in each step, and yield its loss in nats per trained token."""
    optimizer = optimizer_of(model, learning_rate)
    schedule = LambdaLR(optimizer, warm_up_and_cosine(steps))
    model.train()
    for _ in range(steps):
        loss = supervised_step(model, optimizer, batch())
        schedule.step()
        yield loss.item()
    model.eval()


def optimizer_of(model: PreTrainedModel, learning_rate: float) -> AdamW:
    """Return the optimizer of a small model."""
    return AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)


def supervised_step(model: PreTrainedModel, optimizer: AdamW, batch: Batch) -> Tensor:
    """Update the model once; return the loss before, the mean nats per trained token."""
    loss = _loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
    optimizer.step()
    return loss


def warm_up_and_cosine(steps: int) -> Callable[[int], float]:
    """Return step -> learning-rate factor: linear warm-up, then half a cosine to 0."""

    def factor(step: int) -> float:
        rising = (step + 1) / _WARM_UP_STEPS
        return min(rising, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))

    return factor


def _draw(curriculum: Curriculum, random: Random) -> Exercise:
    if curriculum != "format":
        return draw_training(curriculum, random)
    return with_random_completion(draw_training(random.choice(TASKS), random), random)


def _loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch.token_ids, attention_mask=batch.attention).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
    )
