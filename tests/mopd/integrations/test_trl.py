"""``ServiceLoss`` on batches in the forms of TRL's trainers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mopd.integrations.tail_loss import tail_divergence
from mopd.integrations.trl import ServiceLoss
from mopd_protocol import ConfigError, TopKLogprobs

WIDTH, TOP_K = 10, 3
TABLE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Bigrams:
    """A teacher whose distribution depends on the token before."""

    top_k = TOP_K

    def __init__(self) -> None:
        self.requests: list[tuple[list[list[int]], list[int]]] = []

    def score(
        self, sequences: list[list[int]], first: list[int], top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        self.requests.append((sequences, first))
        scores = []
        for ids, start in zip(sequences, first, strict=True):
            rows = (TABLE[ids[start - 1 : -1]] / temperature).log_softmax(1)
            best = rows.topk(top_k)
            own = rows[torch.arange(len(rows)), ids[start:]]
            tail = np.log1p(-best.values.exp().sum(1).numpy())
            scores.append(
                TopKLogprobs(best.indices.numpy(), best.values.numpy(), own.numpy(), tail)
            )
        return scores


def trainer(**settings: Any) -> tuple[ServiceLoss, Bigrams]:
    """Return a loss outside of a trainer, and its teacher."""
    loss, teacher = ServiceLoss(), Bigrams()
    loss.teacher = teacher  # pyright: ignore
    loss.args = SimpleNamespace(average_tokens_across_devices=True)
    loss.accelerator = SimpleNamespace(num_processes=2)
    loss.current_gradient_accumulation_steps = 4
    for name, value in settings.items():
        setattr(loss, name, value)
    return loss, teacher


def student(weights: torch.Tensor) -> Any:
    """Return a model that is a table of bigrams too."""

    def model(input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=weights[input_ids])

    model.training = True
    return model


def expected(weights: torch.Tensor, pairs: list[tuple[int, int]], **settings: float) -> float:
    """Return the sum over (token before, token) pairs."""
    before = torch.tensor([first for first, _ in pairs])
    rows = (TABLE[before] / settings.get("temperature", 1.0)).log_softmax(1).topk(TOP_K)
    return tail_divergence(weights[before], rows.indices, rows.values, **settings)[0].sum().item()


def test_sampled_completions_with_padding_on_both_sides() -> None:
    weights = torch.randn(WIDTH, WIDTH)
    loss, teacher = trainer(beta=0.5, temperature=0.7)
    batch = {
        "prompt_ids": torch.tensor([[0, 1, 2], [3, 4, 5]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[6, 7, 8], [9, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "num_items_in_batch": torch.tensor(8.0),
    }
    value = loss.compute_loss(student(weights), batch, num_items_in_batch=torch.tensor(99))
    assert teacher.requests == [([[1, 2, 6, 7, 8], [3, 4, 5, 9, 1]], [2, 3])]
    total = expected(weights, [(2, 6), (7, 8), (5, 9), (9, 1)], beta=0.5, temperature=0.7)
    assert value.item() == pytest.approx(total / (8 / 2), rel=1e-5)


@pytest.mark.parametrize(("items", "divisor"), [(torch.tensor(6), 3), (None, 3 * 4)])
def test_labelled_sequences(items: torch.Tensor | None, divisor: float) -> None:
    weights = torch.randn(WIDTH, WIDTH)
    loss, teacher = trainer()
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        "labels": torch.tensor([[-100, -100, 3, 4], [5, 6, -100, -100], [-100] * 4]),
    }
    value = loss.compute_loss(student(weights), batch, num_items_in_batch=items)
    assert teacher.requests == [([[1, 2, 3, 4], [5, 6]], [2, 1])]
    total = expected(weights, [(2, 3), (3, 4), (5, 6)])
    assert value.item() == pytest.approx(total / divisor, rel=1e-5)


def test_a_batch_without_trained_tokens_has_a_loss_of_zero() -> None:
    loss, _ = trainer()
    weights = torch.randn(WIDTH, WIDTH, requires_grad=True)
    ids = torch.tensor([[1, 2]])
    batch = {"input_ids": ids, "attention_mask": ids, "labels": torch.full((1, 2), -100)}
    value = loss.compute_loss(student(weights), batch)
    value.backward()
    assert value.item() == 0


def test_packed_sequences_raise() -> None:
    loss, _ = trainer()
    with pytest.raises(ConfigError) as caught:
        loss.compute_loss(student(TABLE), {"input_ids": torch.tensor([[1]])})
    assert caught.value.key == "packing"
