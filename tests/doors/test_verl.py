"""verl's teacher manager against a teacher service, and losses that count the tail."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.docs.pages import examples
from tests.doors.conftest import ROUNDING, TOP_K, Teacher

pytestmark = pytest.mark.doors


def with_rest(logprobs: Tensor) -> Tensor:
    """[rows, k] in float64 -> [rows, k + 1], the rest as the last entry."""
    rest = torch.log1p(-logprobs.exp().sum(1, keepdim=True))
    return torch.cat([logprobs, rest], dim=1)


def test_scores_and_losses(run_script: Callable[..., Any], url: str, teacher: Teacher) -> None:
    torch.manual_seed(0)
    width = teacher.model.config.vocab_size
    logits = [torch.randn(len(ids), width) for ids in teacher.sequences]
    (command,) = [text for _, text in examples("sh", "other-trainers.md") if "verl" in text]
    command = command.replace("http://127.0.0.1:8101", url).replace("topk=64", f"topk={TOP_K}")
    overrides = re.findall(r"^ +(distillation\.\S+)", command, re.M)
    assert len(overrides) == 8
    result = run_script(
        "verl", "verl_teacher.py", overrides=overrides, logits=[rows.tolist() for rows in logits]
    )
    assert result["errors"] == {
        "forward_kl_tail": {"loss": "tail", "key": None},
        "reverse_kl_tail": {"loss": "tail", "key": None},
        "forward_kl_topk": {"loss": "forward_kl_topk", "key": "distillation_loss.loss_mode"},
        "k3": {"loss": "token", "key": None},
    }
    for number, ids in enumerate(teacher.sequences):
        expected = teacher.logprobs(ids).numpy()
        top = np.sort(expected, axis=1)[:, : -TOP_K - 1 : -1]
        for mode in ("forward_kl_tail", "reverse_kl_tail", "forward_kl_topk"):
            entries, logprobs = map(np.array, result["scores"][mode][number])
            assert len(entries) == len(ids)
            np.testing.assert_allclose(logprobs[:-1], top, atol=ROUNDING)
            named = np.take_along_axis(expected, entries[:-1], axis=1)
            np.testing.assert_allclose(logprobs[:-1], named, atol=ROUNDING)
        entries, logprobs = map(np.array, result["scores"]["k3"][number])
        assert entries[:-1, 0].tolist() == ids[1:]
        own = [row[token] for row, token in zip(expected, ids[1:], strict=True)]
        np.testing.assert_allclose(logprobs[:-1, 0], own, atol=ROUNDING)
    for name, kept in (("forward_kl_tail", TOP_K), ("reverse_kl_tail", TOP_K), ("missing", 7)):
        rows = [part.double().requires_grad_() for part in logits]
        values: list[Tensor] = []
        masses: list[Tensor] = []
        for part, ids, start in zip(rows, teacher.sequences, teacher.prompt_lengths, strict=True):
            named = teacher.logprobs(ids)[start - 1 :].topk(kept)
            student = with_rest(part.log_softmax(1)[start - 1 : -1].gather(1, named.indices))
            other = with_rest(named.values)
            first, second = (student, other) if name.startswith("reverse") else (other, student)
            values.append((first.exp() * (first - second)).sum(1))
            masses.append(named.values.exp().sum(1))
        value = torch.cat(values).mean()
        value.backward()
        loss = result["losses"][name]
        assert loss["loss"] == pytest.approx(value.item(), abs=1e-5)
        assert loss["teacher_mass"] == pytest.approx(torch.cat(masses).mean().item(), abs=1e-5)
        for part, gradient in zip(rows, loss["gradients"], strict=True):
            torch.testing.assert_close(
                torch.tensor(gradient).double(), part.grad, atol=1e-6, rtol=1e-4
            )
