"""Real tokenizers that disagree: every byte of an NFC text is aligned."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from tests.losses.families import PAIRS, family
from tests.losses.sequences import spans
from tests.reference.alignment import every_pair_of_prefixes, tokens_of

SAMPLES = [
    "Grüße, 的 的 漢字 — مرحبا नमस्ते สวัสดี 안녕하세요 שלום",
    "👨‍👩‍👧 🏳️‍🌈🙂🙂 e\u0301\u0301 z\u0308",
    "def f(x):\r\n\treturn x ** 2  # twice\r\n\r\n\n\n    print(f(12345))\n",
    "   leading, trailing   ",
    "3.14159 265358 979,323 1e-10 0xFF",
    "\x00\x01 NUL and \u200b zero width \ufeff",
    "<|end|> <|im_end|> </s> <s> are only text here",
    "<0x41> and <0x0A> are only text too",
]

mixed = st.text(
    st.one_of(
        st.sampled_from("aeiou bcd 0123456789 \t\r\n.,<|>的漢字אבגपनมس안🙂👨‍🏳️"),
        # SentencePiece writes a space as ▁, and so cannot distinguish ▁ from a space.
        st.characters(exclude_categories=["Cs"], exclude_characters="▁"),
    ),
    max_size=60,
).map(lambda text: unicodedata.normalize("NFC", text))


def assert_all_bytes_align(text: str, student_name: str, teacher_name: str) -> None:
    student, teacher = (
        family(name).table.sequence(family(name).encoder.encode(text))
        for name in (student_name, teacher_name)
    )
    assert student.text == teacher.text == text.encode()
    alignment = align(student, teacher)
    assert alignment.aligned_bytes(student) == len(student.text)
    assert spans(alignment) == every_pair_of_prefixes(tokens_of(student), tokens_of(teacher))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@pytest.mark.parametrize("text", SAMPLES)
def test_every_byte_of_a_sample_aligns(text: str, student: str, teacher: str) -> None:
    assert_all_bytes_align(unicodedata.normalize("NFC", text), student, teacher)


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@given(text=mixed)
@settings(deadline=None, max_examples=25)
def test_every_byte_of_any_text_aligns(text: str, student: str, teacher: str) -> None:
    assert_all_bytes_align(text, student, teacher)


def test_a_normalizing_teacher_aligns_all_unchanged_text() -> None:
    text = "cafe\u0301 au lait"
    student, teacher = (
        family(name).table.sequence(family(name).encoder.encode(text))
        for name in ("digit", "whole_number")
    )
    assert student.text != teacher.text
    alignment = align(student, teacher)
    ends = [0, *student.byte_ends.tolist()]
    spelled = [student.text[ends[s] : ends[s_end]] for s, s_end, _, _ in spans(alignment)]
    assert b"".join(spelled).startswith(b"ca")
    assert b"".join(spelled).endswith(b" lait")


@pytest.mark.parametrize("other", ["digit", "whole_number"])
def test_only_a_character_that_one_side_cannot_encode_is_unaligned(other: str) -> None:
    text = "before ▁ after"
    student, teacher = (
        family(name).table.sequence(family(name).encoder.encode(text))
        for name in (other, "sentencepiece")
    )
    assert teacher.text == text.replace("▁", " ").encode()
    assert align(student, teacher).aligned_bytes(student) >= len("before") + len("after")
