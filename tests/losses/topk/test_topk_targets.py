"""Teacher rows of student tokens, and batches of several completions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.topk.topk_targets import concatenate_targets, topk_targets
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.sequences import Piece, sequence, two_texts
from tests.losses.topk_problems import topk_loss
from tests.reference.alignment import every_pair_of_prefixes, tokens_of

VOCABULARY = 5


def distinct_rows(rows: int, k: int = 2) -> TopKLogprobs:
    """A top-k whose rows can be distinguished: every row has a different mass."""
    first = np.linspace(0.5, 0.6, rows) if rows else np.zeros(0)
    masses = np.stack([first, *[np.full(rows, 0.2 / (n + 1)) for n in range(k - 1)]], axis=1)
    return TopKLogprobs(
        ids=np.stack([np.roll(np.arange(VOCABULARY), r)[:k] for r in range(rows)])
        if rows
        else np.zeros((0, k)),
        logprobs=np.log(masses),
        token_logprobs=np.log(masses[:, 0]),
        tail_logprobs=np.log(1 - masses.sum(axis=1)),
    )


def test_the_first_token_of_a_span_is_compared_with_the_teachers_row_for_its_first_token() -> None:
    student: list[Piece] = [b"a", b"b", b"cd", END_OF_TURN]
    teacher: list[Piece] = ["bos", b"ab", b"c", b"d", END_OF_TURN]
    topk = distinct_rows(5)
    targets = topk_targets(align(sequence(student), sequence(teacher)), topk)
    assert targets.positions.tolist() == [0, 2, 3]
    for row, teacher_row in enumerate([1, 2, 4]):
        assert targets.ids[row].tolist() == topk.ids[teacher_row].tolist()
        np.testing.assert_array_equal(targets.logprobs[row], topk.logprobs[teacher_row])
        assert targets.tail_logprobs[row].item() == topk.tail_logprobs[teacher_row]


@given(two_texts())
@settings(deadline=None, max_examples=40)
def test_positions_and_rows_are_where_both_sides_have_read_the_same(
    two: tuple[list[Piece], list[Piece]],
) -> None:
    student, teacher = sequence(two[0]), sequence(two[1])
    topk = distinct_rows(len(teacher))
    targets = topk_targets(align(student, teacher), topk)
    by_mass = {float(lp): row for row, lp in enumerate(topk.logprobs[:, 0].tolist())}
    rows = [by_mass[lp] for lp in targets.logprobs[:, 0].tolist()]
    compared = list(zip(targets.positions.tolist(), rows, strict=True))
    shared = every_pair_of_prefixes(tokens_of(student), tokens_of(teacher))
    assert compared[: len(shared)] == [(s, t) for s, _, t, _ in shared]


def test_a_teacher_shifted_by_one_row_would_not_match_its_own_copy() -> None:
    """The same model on both sides costs nothing, which one row's shift on either would undo."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, VOCABULARY, generator=generator, dtype=torch.float64) * 2
    logprobs, order = logits.log_softmax(dim=1).sort(dim=1, descending=True)
    topk = TopKLogprobs(
        ids=order[:, :3].numpy(),
        logprobs=logprobs[:, :3].numpy(),
        token_logprobs=logprobs[:, 0].numpy(),
        tail_logprobs=logprobs[:, 3:].logsumexp(dim=1).numpy(),
    )
    pieces: list[Piece] = [b"the", b" quick", b" brown", b" fox", b".", END_OF_TURN]
    alignment = align(sequence(pieces), sequence(pieces, first_id=50))
    output = topk_loss(logits, topk_targets(alignment, topk))
    np.testing.assert_allclose(output.per_token.numpy(), 0, atol=1e-5)
    shifted = topk_loss(logits.roll(1, dims=0), topk_targets(alignment, topk))
    assert (shifted.per_token > 1e-2).all()


def test_targets_are_copies_with_the_stated_types() -> None:
    topk = distinct_rows(2)
    pieces: list[Piece] = [b"a", b"b"]
    targets = topk_targets(align(sequence(pieces), sequence(pieces)), topk)
    assert (targets.positions.dtype, targets.ids.dtype) == (torch.int64, torch.int64)
    assert (targets.logprobs.dtype, targets.tail_logprobs.dtype) == (torch.float32, torch.float32)
    targets.logprobs.zero_()
    targets.ids.zero_()
    assert topk.logprobs.max() < 0
    assert topk.ids.max() > 0


def test_nothing_concatenated_is_empty_and_costs_nothing() -> None:
    targets = concatenate_targets([], [])
    assert (targets.positions.shape, targets.ids.shape) == ((0,), (0, 0))
    logits = torch.zeros(3, VOCABULARY, requires_grad=True)
    losses = topk_loss(logits, targets).per_token
    assert losses.tolist() == [0, 0, 0]
    assert losses.requires_grad


def test_parts_and_offsets_must_be_as_many() -> None:
    part = topk_targets(align(sequence([b"a"]), sequence([b"a"])), distinct_rows(1))
    with pytest.raises(ValueError, match="zip"):
        concatenate_targets([part], [0, 1])


def test_narrower_parts_are_padded_with_empty_entries() -> None:
    pieces: list[Piece] = [b"a", b"b"]
    alignment = align(sequence(pieces), sequence(pieces))
    narrow, wide = (topk_targets(alignment, distinct_rows(2, k)) for k in (1, 3))
    targets = concatenate_targets([narrow, wide], [0, 2])
    assert targets.positions.tolist() == [0, 1, 2, 3]
    assert targets.ids[:2].tolist() == [[0, -1, -1], [4, -1, -1]]
    assert torch.isneginf(targets.logprobs[:2, 1:]).all()
    assert torch.equal(targets.ids[2:], wide.ids)
    assert torch.equal(targets.logprobs[2:], wide.logprobs)
