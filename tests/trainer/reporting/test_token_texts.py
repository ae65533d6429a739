"""The texts of tokens are the text, whatever bytes a token ends at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_trainer.reporting.token_texts import token_texts

plain = st.text(
    st.characters(
        exclude_categories=("Cc", "Cs"),
        exclude_characters="\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    )
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces, some of them empty."""
    bounds = sorted(min(place, len(data)) for place in places)
    return [data[a:b] for a, b in zip([0, *bounds], [*bounds, len(data)], strict=True)]


@given(plain, st.lists(st.integers(0, 40)))
def test_a_character_is_shown_by_the_token_that_ends_it(text: str, places: list[int]) -> None:
    tokens = cut(text.encode(), places)
    expected: list[str] = []
    for at in range(len(tokens)):
        # What is whole before this token and with it.
        before, with_it = (b"".join(tokens[:end]).decode(errors="ignore") for end in (at, at + 1))
        expected.append(with_it.removeprefix(before))
    assert token_texts(tokens) == expected
    assert "".join(token_texts(tokens)) == text


@given(st.binary(), st.lists(st.integers(0, 40)))
def test_any_bytes_are_shown_alike_however_they_are_cut(data: bytes, places: list[int]) -> None:
    tokens = cut(data, places)
    assert len(token_texts(tokens)) == len(tokens)
    assert "".join(token_texts(tokens)) == "".join(token_texts([data]))


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([b"a", b"\xe7", b"\x9a", b"\x84b"], ["a", "", "", "的b"]),
        ([b"\xe7\x9a", b"x"], ["\\xe7\\x9a", "x"]),
        ([b"\xff", b""], ["\\xff", ""]),
        ([b"a\n", b"\t\r\x00\x1b"], ["a↵\n", "\t\\r\\x00\\x1b"]),
        (["\u202e".encode(), "\u2066x".encode()], ["\\u202e", "\\u2066x"]),
        ([b"\xed\xa0", b"\x80"], ["\\xed\\xa0", "\\x80"]),
        ([], []),
    ],
)
def test_what_is_no_character_or_has_no_shape_is_escaped(
    tokens: list[bytes], shown: list[str]
) -> None:
    assert token_texts(tokens) == shown
