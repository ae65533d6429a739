"""Two texts that are not the same: never a span whose bytes differ, and no more lost than must."""

import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from tests.losses.sequences import Piece, aligned, cut, sequence, texts, two_texts
from tests.reference.alignment import (
    Span,
    every_pair_of_prefixes,
    every_pair_of_suffixes,
    spell,
    tokens_of,
)

Two = tuple[list[Piece], list[Piece]]

WORDS = [f"{number:x}{chr(97 + number % 26)} ".encode() for number in range(100, 300)]


def assert_spans_are_true_and_minimal(student: list[Piece], teacher: list[Piece]) -> list[Span]:
    left, right = tokens_of(sequence(student)), tokens_of(sequence(teacher))
    aligned_spans = aligned(student, teacher)
    for s, s_end, t, t_end in aligned_spans:
        assert spell(left[s:s_end]) == spell(right[t:t_end])
        assert len(every_pair_of_prefixes(left[s:s_end], right[t:t_end])) == 1
    return aligned_spans


@given(two_texts())
@settings(deadline=None, max_examples=150)
def test_no_span_has_two_spellings_and_common_prefix_and_suffix_are_aligned(two: Two) -> None:
    left, right = tokens_of(sequence(two[0])), tokens_of(sequence(two[1]))
    aligned_spans = assert_spans_are_true_and_minimal(*two)
    prefix, suffix = every_pair_of_prefixes(left, right), every_pair_of_suffixes(left, right)
    assert aligned_spans[: len(prefix)] == prefix
    assert not suffix or aligned_spans[-len(suffix) :] == suffix


@given(texts().flatmap(cut), texts().flatmap(cut))
@settings(deadline=None)
def test_two_unrelated_texts_have_no_false_span(student: list[Piece], teacher: list[Piece]) -> None:
    assert_spans_are_true_and_minimal(student, teacher)


def test_two_texts_with_no_letter_in_common_have_no_span() -> None:
    assert aligned([b"abc", b"def"], [b"uvw", b"xyz"]) == []


@given(st.data(), st.sampled_from([0, 1]))
@settings(deadline=None)
def test_a_truncated_side_aligns_up_to_the_truncation(data: st.DataObject, side: int) -> None:
    text = data.draw(texts())
    kept = text[: data.draw(st.integers(0, len(text)))]
    two = [data.draw(cut(text)), data.draw(cut(kept))]
    student, teacher = two[side], two[1 - side]
    aligned_spans = assert_spans_are_true_and_minimal(student, teacher)
    expected = every_pair_of_prefixes(tokens_of(sequence(student)), tokens_of(sequence(teacher)))
    assert aligned_spans == expected


def test_one_changed_byte_loses_only_the_tokens_around_it() -> None:
    student: list[Piece] = [*WORDS, END_OF_TURN]
    changed = b"#" + WORDS[90][1:]
    teacher: list[Piece] = [*WORDS[:90], changed, *WORDS[91:], END_OF_TURN]
    lost = {90}
    assert aligned(student, teacher) == [(n, n + 1, n, n + 1) for n in range(201) if n not in lost]


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(deadline=None, max_examples=50)
def test_text_between_two_differences_is_aligned_where_it_can_be_found_again(
    seed: int, differences: int
) -> None:
    generator = random.Random(seed)
    places = sorted(generator.sample(range(5, 195, 10), differences))
    teacher = list(WORDS)
    for place in reversed(places):
        teacher[place : place + 1] = [b"#", b"###"][: generator.randint(0, 2)]
    aligned_spans = assert_spans_are_true_and_minimal(list(WORDS), list(teacher))
    whole = {s for s, s_end, _, _ in aligned_spans if s_end == s + 1}
    # A neighbour may share letters with what was taken out, and lose them to it.
    around = {at for place in places for at in (place - 1, place, place + 1)}
    assert whole >= set(range(200)) - around


def test_a_part_that_moved_is_aligned_once_at_most() -> None:
    student = list(WORDS)
    teacher = [*WORDS[100:], *WORDS[:100]]
    aligned_spans = assert_spans_are_true_and_minimal(student, teacher)
    assert 99 <= len(aligned_spans) <= 100  # the last word may lose its space to the common suffix


def test_texts_with_composed_and_decomposed_characters_align_everywhere_else() -> None:
    text = "".join(f"mot {number} déjà vu; " for number in range(30))
    composed, decomposed = (
        [character.encode() for character in unicodedata.normalize(form, text)]
        for form in ("NFC", "NFD")
    )
    aligned_spans = assert_spans_are_true_and_minimal(composed, decomposed)
    plain = {at for at, piece in enumerate(composed) if len(piece) == 1}
    reached = {s for s, _, _, _ in aligned_spans}
    assert reached <= plain
    assert len(reached) > 0.8 * len(plain)


def test_only_bytes_that_are_invalid_utf8_are_unaligned() -> None:
    sampled: list[Piece] = [b"before", b"\x80\xff", b" after", END_OF_TURN]
    reread: list[Piece] = [b"before", "\ufffd\ufffd".encode(), b" after", END_OF_TURN]
    assert aligned(sampled, reread) == [(0, 1, 0, 1), (2, 3, 2, 3), (3, 4, 3, 4)]


@pytest.mark.parametrize("extra", [[b"!"], ["<tool>"], [b"aaa"]])
def test_a_longer_side_does_not_stretch_the_last_span(extra: list[Piece]) -> None:
    assert aligned([b"aa", b"b", *extra], [b"a", b"a", b"b"])[:2] == [(0, 1, 0, 2), (1, 2, 2, 3)]


def test_aligned_bytes_count_only_what_is_aligned() -> None:
    student = sequence([b"same", b"+", b"end"])
    assert align(student, sequence([b"same", b"-", b"end"])).aligned_bytes(student) == 7


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_of_parts_in_another_order_the_most_text_stays(longest: int) -> None:
    parts = [b"".join(WORDS[at : at + 10]) for at in (0, 50, 100)]
    parts[longest] = b"".join(WORDS[50 * longest : 50 * longest + 40])
    student, teacher = (
        sequence([bytes([byte]) for byte in b"".join([b"<", *order, b">"])])
        for order in (parts, parts[::-1])
    )
    # Between the brackets, the parts hang together in reverse: one of them can stay.
    assert align(student, teacher).aligned_bytes(student) >= len(parts[longest]) + 2


def test_two_parts_that_follow_each_other_outweigh_a_longer_one() -> None:
    first, second, longer = WORDS[:12], WORDS[20:32], WORDS[40:60]
    student, teacher = (
        sequence([bytes([byte]) for byte in b"".join(order)])
        for order in (
            [b"<", *first, b"!", *second, *longer, b">"],
            [b"<", *longer, *first, b"?", *second, b">"],
        )
    )
    kept = sum(map(len, first + second))
    assert kept > sum(map(len, longer))
    assert align(student, teacher).aligned_bytes(student) >= kept + 2


def test_anchors_adjacent_on_only_one_side_stay_separate() -> None:
    text = b"".join(WORDS[:20])
    student = sequence([bytes([byte]) for byte in b"<@" + text + b"!"])
    teacher = sequence([bytes([byte]) for byte in b">@" + text[:7] + b"#" + text + b"?"])
    assert align(student, teacher).aligned_bytes(student) >= len(text)
