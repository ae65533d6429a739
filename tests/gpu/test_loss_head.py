"""Every loss on the block-wise head: values and gradients are the CPU's in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd_losses.build import build_loss
from mopd_losses.config import CtkdConfig, GoldConfig, LossConfig, TopKKlConfig
from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head, dense_head
from mopd_losses.core.cross_entropy import SftLoss, label_targets
from mopd_losses.core.loss import Loss, Targets
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss, HiddenTargets
from tests.losses.contract import ROWS
from tests.trainer.scored_examples import TOKENIZERS, aligned_pair, example, teacher_tokenizer
from tests.trainer.students import CPU, ids_of, rollout, student_of

pytestmark = pytest.mark.gpu

HIDDEN_SIZE = 16
ROWS_PER_BLOCK = 7
TEXTS = ("12 + 30 = 42", "def add(a, b):\n    return a + b", "的 🙂 Grüße", "7")

#: Share of the largest entry by which values differ: float32 has 24 bits, and a row sums hundreds.
VALUE = 1e-5
#: Share of a gradient's norm by which it differs. In half precision the gradient of the logits has
#: 8 bits, when it is multiplied out.
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 2**-7}

IDENTITY = student_of("qwen").identity


def _configs() -> dict[str, tuple[LossConfig, str]]:
    """Name of each loss with real tokenizers -> its settings and teacher."""
    chosen: dict[str, tuple[LossConfig, str]] = {}
    for row in ROWS:
        if not row.name.startswith("full_vocabulary"):
            chosen[row.name] = row.config, "math" if row.one_tokenizer else "code"
    return chosen


CONFIGS = _configs()


def comparisons(teacher: str) -> tuple[list[Any], list[int], int]:
    """Return completions with made-up scores, the position of each, and all positions."""
    pairs: list[Any] = []
    offsets: list[int] = []
    positions = 0
    for index, text in enumerate(TEXTS):
        ids = ids_of("digit", text, "<|end|>")
        item = example(rollout("digit", ids, teachers={teacher: 1.0}, index=index), seed=index)
        pairs.append(aligned_pair(item, item.scores[0]))
        offsets.append(positions)
        positions += len(ids)
    return pairs, offsets, positions


def drawn(positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a head and weights of positions, rounded to the precision."""
    generator = torch.Generator().manual_seed(0)
    width = IDENTITY.logit_width
    hidden = torch.randn(positions, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(width, HIDDEN_SIZE, generator=generator) / 2
    return hidden.to(dtype), weight.to(dtype), torch.rand(positions, generator=generator)


def by_head(
    loss: Loss, targets: Targets, tensors: tuple[Tensor, Tensor, Tensor], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return the value of each position, and both gradients, from the head on a device."""
    hidden, weight = (each.to(device).requires_grad_() for each in tensors[:2])
    terms = [LossTerm(loss, targets.to(device), tensors[2].to(device))]
    head = Head(weight, real_ids().to(device))
    total, (output,) = blockwise_head(hidden, head, terms, rows_per_block=ROWS_PER_BLOCK)
    assert output.per_token.device == hidden.device
    return output.per_token, list(torch.autograd.grad(total * 3, (hidden, weight)))


def in_float64(
    loss: Loss, targets: Targets, tensors: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The same from all logits at once, on the CPU."""
    hidden, weight = (each.double().requires_grad_() for each in tensors[:2])
    terms = [LossTerm(loss, targets, tensors[2].double())]
    total, (output,) = dense_head(hidden @ weight.T, real_ids(), terms)
    return output.per_token, list(torch.autograd.grad(total * 3, (hidden, weight)))


def real_ids() -> Tensor:
    return torch.tensor(IDENTITY.table.real_ids(IDENTITY.logit_width))


def require_close(
    actual: tuple[Tensor, list[Tensor]],
    expected: tuple[Tensor, list[Tensor]],
    dtype: torch.dtype,
) -> None:
    """Compare values by their largest entry, gradients by their norm."""
    values, gradients = actual
    difference = (values.cpu().double() - expected[0]).abs().max()
    assert float(difference) <= VALUE * (1 + float(expected[0].abs().max()))
    for gradient, exact in zip(gradients, expected[1], strict=True):
        error = (gradient.cpu().double() - exact).norm()
        assert float(error) <= GRADIENT[dtype] * float(exact.norm())


@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_on_the_device_is_that_of_the_cpu(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    config, teacher = CONFIGS[name]
    tokenizer = teacher_tokenizer(TOKENIZERS[teacher])
    pairs, offsets, positions = comparisons(teacher)
    tensors = drawn(positions, dtype)
    results: list[tuple[Loss, Targets]] = []
    for where in (CPU, device):
        loss = build_loss(config, IDENTITY, tokenizer, where)
        results.append((loss, loss.targets(pairs, offsets)))
    expected = in_float64(*results[0], tensors)
    assert float(expected[0].abs().max()) > 0
    require_close(by_head(*results[1], tensors, device), expected, dtype)


@pytest.mark.parametrize("dtype", GRADIENT)
def test_cross_entropy_on_the_device_is_that_of_the_cpu(
    dtype: torch.dtype, device: torch.device
) -> None:
    tensors = drawn(40, dtype)
    targets = label_targets(torch.arange(40) + 5)
    expected = in_float64(SftLoss(), targets, tensors)
    require_close(by_head(SftLoss(), targets, tensors, device), expected, dtype)


@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_full_rows_of_a_local_teacher_are_those_of_the_cpu(
    divergence: Any, dtype: torch.dtype, device: torch.device
) -> None:
    tensors = drawn(40, dtype)
    _, weight, _ = drawn(40, dtype)
    teacher = Head(weight.flip(1), real_ids())
    targets = HiddenTargets(torch.arange(40), tensors[0].roll(1, dims=0).float())
    loss = FullVocabularyLoss(teacher, TopKKlConfig(divergence=divergence, kd_temperature=2.0))
    exact = replace(teacher, weight=teacher.weight.double())
    expected = in_float64(
        replace(loss, head=exact), replace(targets, hidden=targets.hidden.double()), tensors
    )
    moved = replace(teacher, weight=teacher.weight.to(device), real_ids=real_ids().to(device))
    require_close(by_head(replace(loss, head=moved), targets, tensors, device), expected, dtype)


@pytest.mark.parametrize("config", [CtkdConfig(), GoldConfig()], ids=lambda each: each.type)
def test_a_capped_scaled_head_with_a_bias(config: LossConfig, device: torch.device) -> None:
    tokenizer = teacher_tokenizer(TOKENIZERS["code"])
    pairs, offsets, positions = comparisons("code")
    hidden, weight, weights = drawn(positions, torch.float32)
    tensors = (hidden, weight, torch.linspace(-1, 1, len(weight)))

    def terms(where: torch.device) -> list[LossTerm]:
        loss = build_loss(config, IDENTITY, tokenizer, where)
        return [LossTerm(loss, loss.targets(pairs, offsets).to(where), weights.to(where))]

    exact = [each.double().requires_grad_() for each in tensors]
    logits = 3 * torch.tanh(0.5 * (exact[0] @ exact[1].T + exact[2]) / 3)
    expected, _ = dense_head(logits, real_ids(), terms(CPU))
    leaves = [each.to(device).requires_grad_() for each in tensors]
    head = Head(leaves[1], real_ids().to(device), leaves[2], scale=0.5, soft_cap=3.0)
    total, _ = blockwise_head(leaves[0], head, terms(device), rows_per_block=ROWS_PER_BLOCK)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=VALUE)
    gradients = torch.autograd.grad(total, leaves), torch.autograd.grad(expected, exact)
    for gradient, reference in zip(*gradients, strict=True):
        error = (gradient.cpu().double() - reference).norm()
        assert float(error) <= GRADIENT[torch.float32] * float(reference.norm())
