"""Divergences over whole vocabularies, from hidden states: the formula, id by id, and its slope."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_losses.alignment.byte_alignment import identity_alignment
from mopd_losses.config import TopKKlConfig
from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head, dense_head
from mopd_losses.core.loss import AlignedPair
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss, HiddenScore, HiddenTargets
from mopd_protocol.errors import DataError
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

IDS = 7  # of the tokenizer that both have
WIDTHS = (9, 8)  # of the student's head and the teacher's: padding of either


def problem(seed: int, positions: int = 5) -> tuple[Tensor, Head, Tensor, Head]:
    """Hidden states and heads of a student and a teacher, in float64."""
    draw = torch.Generator().manual_seed(seed)
    drawn: list[Tensor | Head] = []
    for width, size in zip(WIDTHS, (4, 3), strict=True):
        real = torch.arange(width) < IDS
        weight = torch.randn((width, size), generator=draw, dtype=torch.float64)
        drawn.append(torch.randn((positions, size), generator=draw, dtype=torch.float64) * 2)
        drawn.append(Head(weight, real))
    hidden, head, teacher_hidden, teacher = drawn
    assert isinstance(hidden, Tensor)
    assert isinstance(teacher_hidden, Tensor)
    assert isinstance(head, Head)
    assert isinstance(teacher, Head)
    return hidden, head, teacher_hidden, teacher


@pytest.mark.parametrize("rows_per_block", [1, 2, 100])
def test_blocks_change_nothing(rows_per_block: int) -> None:
    """Also combined with another loss that reads single ids."""
    hidden, head, teacher_hidden, teacher = problem(3)
    config = TopKKlConfig(divergence="jsd", kd_temperature=0.7)
    targets = HiddenTargets(torch.arange(5), teacher_hidden)

    def terms() -> list[LossTerm]:
        weights = torch.linspace(0.5, 2, 5)
        loss = FullVocabularyLoss(teacher, config)
        other = FullVocabularyLoss(teacher, TopKKlConfig(divergence="reverse_kl"))
        return [LossTerm(loss, targets, weights), LossTerm(other, targets, weights)]

    hidden.requires_grad_()
    dense, outputs = dense_head(hidden @ head.weight.T, head.real_ids, terms())
    (expected,) = torch.autograd.grad(dense, hidden)
    total, others = blockwise_head(hidden, head, terms(), rows_per_block=rows_per_block)
    (gradient,) = torch.autograd.grad(total, hidden)
    torch.testing.assert_close(total, dense)
    torch.testing.assert_close(gradient, expected)
    for output, dense_output in zip(others, outputs, strict=True):
        torch.testing.assert_close(output.per_token, dense_output.per_token)
        assert output.measured["teacher_mass"].tolist() == [1.0] * 5


def completion(tokens: int) -> TokenSequence:
    ends = np.arange(1, tokens + 1, dtype=np.int32)
    return TokenSequence(np.arange(tokens, dtype=np.int32), ends, b"a" * tokens)


def topk(tokens: int) -> TopKLogprobs:
    return TopKLogprobs(
        ids=np.zeros((tokens, 1), dtype=np.int32),
        logprobs=np.zeros((tokens, 1), dtype=np.float32),
        token_logprobs=np.zeros(tokens, dtype=np.float32),
        tail_logprobs=np.full(tokens, -np.inf, dtype=np.float32),
    )


def test_targets_are_at_the_positions_of_their_completions() -> None:
    hidden = torch.randn(5, 3)
    comparisons = [
        AlignedPair(
            completion(len(part)),
            None,
            HiddenScore("id", completion(len(part)), topk(len(part)), part),
            identity_alignment(len(part)),
        )
        for part in (hidden[:2], hidden[2:])
    ]
    loss = FullVocabularyLoss(problem(0)[3], TopKKlConfig())
    targets = loss.targets(comparisons, [1, 4])
    assert targets.positions.tolist() == [1, 2, 4, 5, 6]
    assert torch.equal(targets.hidden, hidden)
    part = targets.between(2, 6)
    assert part.positions.tolist() == [0, 2, 3]
    assert torch.equal(part.hidden, hidden[1:4])


def test_a_score_without_hidden_states_is_refused() -> None:
    score = TeacherScore("id", completion(2), topk(2))
    comparison = AlignedPair(completion(2), None, score, identity_alignment(2))
    loss = FullVocabularyLoss(problem(0)[3], TopKKlConfig())
    with pytest.raises(DataError) as caught:
        loss.targets([comparison], [0])
    assert caught.value.key == "hidden"
    with pytest.raises(DataError) as caught:
        HiddenScore("id", completion(2), topk(2), torch.zeros(1, 3))
    assert caught.value.key == "hidden"


@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.25, None), (1.0, 3.0)])
def test_a_heads_logits_are_what_families_make_of_them(
    scale: float, soft_cap: float | None
) -> None:
    hidden, head, _, _ = problem(1)
    bias = torch.linspace(-1, 1, WIDTHS[0], dtype=torch.float64)
    uncapped = scale * (hidden @ head.weight.T + bias)
    expected = uncapped if soft_cap is None else soft_cap * torch.tanh(uncapped / soft_cap)
    logits = Head(head.weight, head.real_ids, bias, scale, soft_cap).logits(hidden)
    torch.testing.assert_close(logits[:, :IDS], expected[:, :IDS])
    assert torch.isneginf(logits[:, IDS:]).all()
