"""Two tokenizations of one text, against the reference that tries every pair of prefixes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import Alignment, align, identity_alignment
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from tests.losses.sequences import (
    Piece,
    aligned,
    cut,
    sequence,
    spans,
    texts,
    two_tokenizations,
)
from tests.reference.alignment import every_pair_of_prefixes, spell, tokens_of

Two = tuple[list[Piece], list[Piece]]


@given(two_tokenizations())
@settings(deadline=None, max_examples=200)
def test_alignment_equals_trying_every_pair_of_prefixes(two: Two) -> None:
    student, teacher = sequence(two[0]), sequence(two[1], first_id=1000)
    expected = every_pair_of_prefixes(tokens_of(student), tokens_of(teacher))
    assert spans(align(student, teacher)) == expected


@given(two_tokenizations())
@settings(deadline=None)
def test_spans_of_one_text_leave_no_token_out_and_none_twice(two: Two) -> None:
    aligned_spans = aligned(*two)
    student = [token for start, end, _, _ in aligned_spans for token in range(start, end)]
    teacher = [token for _, _, start, end in aligned_spans for token in range(start, end)]
    assert student == list(range(len(two[0])))
    assert teacher == list(range(len(two[1])))


@given(two_tokenizations())
@settings(deadline=None)
def test_both_sides_of_a_span_spell_the_same_and_no_smaller_span_does(two: Two) -> None:
    student, teacher = (tokens_of(sequence(pieces)) for pieces in two)
    for s, s_end, t, t_end in aligned(*two):
        assert spell(student[s:s_end]) == spell(teacher[t:t_end])
        assert len(every_pair_of_prefixes(student[s:s_end], teacher[t:t_end])) == 1


@given(texts().flatmap(cut))
@settings(deadline=None)
def test_one_tokenization_aligns_with_itself_token_by_token(pieces: list[Piece]) -> None:
    alignment = align(sequence(pieces), sequence(pieces, first_id=7))
    assert spans(alignment) == spans(identity_alignment(len(pieces)))
    assert alignment.one_to_one.tolist() == [True] * len(pieces)


@given(two_tokenizations())
@settings(deadline=None)
def test_swapping_the_sides_swaps_the_spans(two: Two) -> None:
    swapped = [(t, t_end, s, s_end) for s, s_end, t, t_end in aligned(two[1], two[0])]
    assert aligned(*two) == swapped


@given(two_tokenizations(), two_tokenizations())
@settings(deadline=None)
def test_joining_two_texts_joins_their_alignments(first: Two, second: Two) -> None:
    s, t = len(first[0]), len(first[1])
    moved = [(a + s, b + s, c + t, d + t) for a, b, c, d in aligned(*second)]
    joined = aligned(first[0] + second[0], first[1] + second[1])
    assert joined == aligned(*first) + moved


@given(two_tokenizations())
@settings(deadline=None)
def test_aligned_bytes_of_one_text_are_all_its_bytes(two: Two) -> None:
    student, teacher = sequence(two[0]), sequence(two[1])
    assert align(student, teacher).aligned_bytes(student) == len(student.text)


def test_end_of_turn_tokens_align_regardless_of_their_ids() -> None:
    aligned_spans = aligned([b"the", b" end", END_OF_TURN], [b"the end", END_OF_TURN])
    assert aligned_spans == [(0, 2, 0, 1), (2, 3, 1, 2)]


def test_an_end_of_turn_is_unaligned_when_the_other_side_has_none() -> None:
    assert aligned([b"the", b" end", END_OF_TURN], [b"the end"]) == [(0, 2, 0, 1)]
    assert aligned([b"the end"], [b"the", b" end", END_OF_TURN]) == [(0, 1, 0, 2)]


def test_an_end_of_turn_aligns_with_no_other_control_token_and_no_text() -> None:
    assert aligned([b"a", END_OF_TURN], [b"a", "<tool>"]) == [(0, 1, 0, 1)]
    assert aligned([b"a", END_OF_TURN], [b"a", b"<|end|>"]) == [(0, 1, 0, 1)]


def test_a_control_token_of_only_one_side_splits_no_other_span() -> None:
    assert aligned(["bos", b"ab", b"c"], [b"a", b"bc"]) == [(1, 3, 0, 2)]


def test_control_tokens_align_only_at_the_same_position() -> None:
    aligned_spans = aligned([b"a", "<tool>", b"bb", b"c"], [b"a", b"bb", "<tool>", b"c"])
    assert (1, 2, 2, 3) not in aligned_spans
    assert aligned_spans[0] == (0, 1, 0, 1)
    assert aligned_spans[-1] == (3, 4, 3, 4)


def test_a_completion_that_ends_inside_a_character_aligns_to_its_last_byte() -> None:
    character = "的".encode()
    student = [b"a", character[:1], character[1:2]]
    assert aligned(student, [b"a", character[:2]]) == [(0, 1, 0, 1), (1, 3, 1, 2)]


def test_a_character_split_into_bytes_aligns_with_the_whole_character() -> None:
    family = "👨‍👩‍👧".encode()
    student: list[Piece] = [bytes([byte]) for byte in family]
    assert aligned(student, [family]) == [(0, len(family), 0, 1)]


@pytest.mark.parametrize("other", [[], [b"a"], [END_OF_TURN], [b"a", END_OF_TURN]])
def test_nothing_aligns_with_nothing(other: list[Piece]) -> None:
    assert aligned([], other) == []
    assert aligned(other, []) == []


@given(two_tokenizations(), st.data())
@settings(deadline=None)
def test_unmarked_tokens_without_bytes_change_no_span_of_the_others(
    two: Two, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(two[0])))
    widened = [*two[0][:at], b"", *two[0][at:]]
    others = [token for token in range(len(widened)) if token != at]
    aligned_spans = [
        ([token for token in range(s, s_end) if token != at], t, t_end)
        for s, s_end, t, t_end in aligned(widened, two[1])
    ]
    assert aligned_spans == [(others[s:s_end], t, t_end) for s, s_end, t, t_end in aligned(*two)]


@pytest.mark.parametrize(
    "columns",
    [
        ([0], [0], [0], [1]),  # empty
        ([0, 1], [2, 3], [0, 1], [1, 2]),  # overlapping
        ([0, 2], [1, 3], [1, 0], [2, 1]),  # backwards
        ([0], [1], [0, 1], [1, 2]),  # of two lengths
    ],
)
def test_impossible_spans_are_refused(columns: tuple[list[int], ...]) -> None:
    with pytest.raises(DataError):
        Alignment(*[np.array(column, dtype=np.int32) for column in columns])
