"""Long and awkward texts: a method that is not linear would not end before the test's timeout."""

import pytest

from mopd_losses.alignment.byte_alignment import align
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from tests.losses.sequences import spans

#: Each takes a second.
pytestmark = pytest.mark.timeout(300)


def cut_every(text: bytes, length: int) -> TokenSequence:
    ends = [*range(length, len(text), length), len(text)]
    return TokenSequence(token_ids=[0] * len(ends), byte_ends=ends, text=text)


@pytest.mark.parametrize(("student", "teacher"), [(1, 1), (1, 3), (3, 1), (2, 5), (7, 3)])
def test_repeated_digits_align_to_the_last_byte(student: int, teacher: int) -> None:
    text = b"7" * 100_000
    left, right = cut_every(text, student), cut_every(text, teacher)
    alignment = align(left, right)
    assert alignment.aligned_bytes(left) == 100_000
    assert len(alignment) == len({*left.byte_ends.tolist()} & {*right.byte_ends.tolist()})


def test_every_five_byte_tokens_align_with_one_token() -> None:
    text = "🙂\n".encode() * 20_000
    left, right = cut_every(text, 1), cut_every(text, 5)
    expected = [(5 * n, 5 * n + 5, n, n + 1) for n in range(20_000)]
    assert (spans(align(left, right)) == expected) is True


@pytest.mark.parametrize("changed", [b"8", b"", b"88"])
def test_a_million_repeated_digits_with_one_difference_align_around_it(changed: bytes) -> None:
    half = b"7" * 500_000
    left, right = cut_every(half + b"8" + half, 1), cut_every(half + changed + half, 1)
    alignment = align(left, right)
    if changed == b"8":
        assert len(alignment) == int(alignment.one_to_one.sum()) == 1_000_001
    else:
        assert alignment.aligned_bytes(left) >= 1_000_000


def test_many_differences_in_a_long_text_lose_only_themselves() -> None:
    lines = [f"line {number} of a long listing\n".encode() for number in range(10_000)]
    changed = [b"#" + line[1:] if number % 10 == 5 else line for number, line in enumerate(lines)]
    left, right = cut_every(b"".join(lines), 1), cut_every(b"".join(changed), 1)
    assert align(left, right).aligned_bytes(left) == len(left.text) - 1_000


def test_two_long_texts_without_anything_in_common_have_no_span() -> None:
    left, right = cut_every(b"ab" * 100_000, 3), cut_every(b"xy" * 100_000, 2)
    assert len(align(left, right)) == 0
