"""Ranges of cells with marks, and pairs of characters, against the tokens one at a time."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.prefix.vocabulary.hashed_strings import codes_of
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedCell, ranges_of
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from tests.losses.families import family

_TABLE = family("digit").table
_VOCABULARY = SortedVocabulary(_TABLE, control_characters(_TABLE))
_TOKENS = [_VOCABULARY.string_at(rank) for rank in range(len(_VOCABULARY))]


@st.composite
def _cells(draw: st.DrawFn) -> MarkedCell:
    """A beginning of a token, and marks that tokens of the vocabulary begin with, or none does."""
    token = draw(st.sampled_from(_TOKENS))
    begun = token[: draw(st.integers(0, len(token) - 1))]
    text = token[len(begun) : draw(st.integers(len(begun) + 1, len(token)))]
    longer = [t[len(begun) :] for t in _TOKENS if t.startswith(begun + text)]
    texts = {t[:n] for t in longer for n in range(len(text) + 1, len(t) + 1)} | {text + "\x00"}
    marks = draw(st.dictionaries(st.sampled_from(sorted(texts)), st.booleans(), max_size=12))
    return MarkedCell(begun, text, tuple(sorted(marks.items())))


def _belongs(cell: MarkedCell, token: str) -> bool:
    """The longest mark with which a token continues decides."""
    if not token.startswith(cell.begun + cell.text):
        return False
    behind = token[len(cell.begun) :]
    marks = [(len(t), belongs) for t, belongs in cell.marks if behind.startswith(t)]
    return max(marks)[1] if marks else True


@given(st.lists(_cells(), max_size=5))
def test_the_ranges_of_a_cell_have_the_tokens_that_belong_to_it(cells: list[MarkedCell]) -> None:
    starts, stops, counts = ranges_of(_VOCABULARY, cells)
    lasts = np.cumsum(counts)
    assert len(counts) == len(cells)
    for cell, first, last in zip(cells, lasts - counts, lasts, strict=True):
        ranges = list(zip(starts[first:last].tolist(), stops[first:last].tolist(), strict=True))
        ranks = [rank for start, stop in ranges for rank in range(start, stop)]
        assert ranks == [rank for rank, token in enumerate(_TOKENS) if _belongs(cell, token)]
        # Ranges that touch are one.
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))


def test_a_pair_of_characters_is_in_a_token_or_in_none() -> None:
    pairs = {token[at : at + 2] for token in _TOKENS for at in range(len(token) - 1)}
    characters = sorted({*"".join(pairs), "\x00", "\xff", "\u0101", "\uffff"})
    both = [a + b for a in characters for b in characters]
    codes = codes_of("".join(both))
    contained = _VOCABULARY.contain(codes[::2], codes[1::2])
    assert {pair for pair, flag in zip(both, contained.tolist(), strict=True) if flag} == pairs
