"""A tokenizer that changes its text, with one token a byte: unchanged characters are aligned."""

import unicodedata
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.alignment.text_offsets import align_text
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from tests.losses.families import Family, family_of, made_of
from tests.losses.sequences import spans

#: Characters that NFKC leaves, composes, decomposes, shortens and lengthens, each on its own.
CHARACTERS = "a", "b", " ", "が", "é", "e\u0301", "か\u3099", "½", "Ａ", "ｱ", "㍻", "ﬁ", "\u2126"
#: Bytes that are part of no character.
INVALID = b"\xff", b"\xf8"


@cache
def normalizing(end: str = "<end>") -> Family:
    family = made_of(end=end)
    family.tokenizer.normalizer = normalizers.NFKC()
    return family_of(family.tokenizer, family.table.roles)


def tokenized(family: Family, text: str | bytes, *, finished: bool = True) -> TokenSequence:
    end = family.table.roles.end_of_turn
    ids = family.encoder.encode_bytes(text if isinstance(text, bytes) else text.encode())
    assert end is not None
    assert ids is not None
    return family.table.sequence([*ids, *[end] * finished])


@given(st.lists(st.sampled_from([*CHARACTERS, *INVALID]), max_size=30), st.booleans())
@settings(deadline=None, max_examples=200)
def test_every_unchanged_character_and_the_end_are_aligned(
    characters: list[str | bytes], is_finished: bool
) -> None:
    text = b"".join(each if isinstance(each, bytes) else each.encode() for each in characters)
    student = tokenized(made_of(end="<end>"), text)
    teacher = tokenized(normalizing(), text, finished=is_finished)
    expected: list[tuple[int, int]] = []
    left = right = 0
    for character in characters:
        if isinstance(character, bytes):
            own = changed = character
        else:
            own, changed = character.encode(), unicodedata.normalize("NFKC", character).encode()
        if changed == own:
            expected += [(left + n, right + n) for n in range(len(changed))]
        left, right = left + len(own), right + len(changed)
    expected += [(left, right)] * is_finished
    aligned = spans(align_text(student, teacher, normalizing().encoder))
    for s, s_end, t, t_end in aligned:
        pieces = student.token_ids[s:s_end].tolist(), teacher.token_ids[t:t_end].tolist()
        assert pieces[0] == pieces[1]
    # A changed character may begin or end with the same byte as before.
    assert {*expected} <= {(s, t) for s, _, t, _ in aligned}


def test_dense_changes_are_aligned_where_a_comparison_of_texts_is_lost() -> None:
    text = "e\u0301t" * 40
    student, teacher = tokenized(made_of(end="<end>"), text), tokenized(normalizing(), text)
    assert len(align(student, teacher)) < 10
    assert len(align_text(student, teacher, normalizing().encoder)) == 41


@pytest.mark.parametrize("case", ["another text", "invalid bytes"])
def test_texts_are_compared_if_the_tokenizer_does_not_confirm_the_tokens(case: str) -> None:
    text = "½ab½ab"
    student, teacher = tokenized(made_of(end="<end>"), text), tokenized(normalizing(), text)
    if case == "another text":
        teacher = tokenized(normalizing(), "½abb½ab")
        assert spans(align_text(student, teacher, normalizing().encoder)) == spans(
            align(student, teacher)
        )
        return
    ids = [*student.token_ids.tolist()[:-1], 0xC3, *student.token_ids.tolist()[:2]]
    student = made_of(end="<end>").table.sequence(ids)
    teacher = tokenized(normalizing(), text, finished=False)
    aligned = {(s, t) for s, _, t, _ in spans(align_text(student, teacher, normalizing().encoder))}
    assert {(2, 5), (3, 6), (6, 12), (7, 13)} <= aligned
    assert max(s for s, _ in aligned) == 7
