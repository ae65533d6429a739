"""Tokens of the student with which lookaheads end, and the teacher's mass of their texts.

Text that the student's tokenizer spells with one token is in that token only: of a cell that it
begins with, no more is missing of the student's than the teacher's mass of the other texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_losses.prefix.cells import BOUNDED_SHARE
from mopd_losses.prefix.lookaheads.open_tokens import OpenToken
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.text.contexts import WINDOW
from mopd_losses.prefix.vocabulary.hashed_strings import Integers
from mopd_losses.prefix.vocabulary.sorted_vocabulary import is_continuation
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True)
class WholeToken:
    """A token of the student that the teacher expects in place of a sampled one."""

    student_row: int
    rank: int
    nats: float
    """The teacher's, since the token's start: of its text, if what follows is likely and the
    student's tokenizer writes the token in front of it."""


def whole_token(
    pair: TokenizerPair, student: TokenSequence, token: OpenToken, following: TopKLogprobs
) -> WholeToken | None:
    """Find the token that ends with a teacher's one; None if there is none.

    Args:
        student: the completion.
        following: the teacher's row after that token.
    """
    text = token.place.student + token.text
    tokens = pair.student.range_of(text)
    if tokens.start == tokens.longer:
        return None
    likely = (following.ids[0] >= 0) & (following.logprobs[0] >= np.log(BOUNDED_SHARE))
    candidates = following.ids[0][likely]
    strings = [pair.teacher.strings[each] for each in candidates.tolist()]
    # A longer token with what follows is another text.
    ends = np.array([not pair.student.covers(text + string) for string in strings], dtype=np.bool_)
    are_text = ~pair.teacher.is_control[candidates]
    after = [string if is_text else "" for string, is_text in zip(strings, are_text, strict=True)]
    ids, before, _ = _around(student, token.student_row)
    ids = np.append(ids, pair.student.ids[tokens.start])
    kept = ends & pair.student_canonical.keep(ids, before + text, after)
    if not kept.any():
        return None
    nats = token.nats + float(np.logaddexp.reduce(following.logprobs[0][likely][kept]))
    return WholeToken(token.student_row, tokens.start, nats)


def are_written(
    pair: TokenizerPair, student: TokenSequence, row: int, texts: Sequence[str]
) -> list[bool]:
    """Return whether the tokens before a row are the tokenizer's in front of each text, too, if
    they are in front of the completion's: others are not written as a token of this row."""
    ids, before, following = _around(student, row)
    own, *others = pair.student_canonical.keep(ids, before, [following, *texts])
    return [bool(each) or not own for each in others]


def _around(student: TokenSequence, row: int) -> tuple[Integers, str, str]:
    """Return the ids of a few tokens before a row, their text, and the text of a few after it:
    whole characters, as a tokenizer spells them."""
    first = max(row - WINDOW, max((at + 1 for at in student.marks if at < row), default=0))
    while first < row and _begins_inside_a_character(student, first):
        first += 1
    last = min(row + WINDOW, len(student.byte_ends))
    while last < len(student.byte_ends) and _begins_inside_a_character(student, last):
        last += 1
    middle = student.byte_starts[row]
    before = student.text[student.byte_starts[first] : middle].decode("latin-1")
    following = student.text[middle : student.byte_ends[last - 1]].decode("latin-1")
    return student.token_ids[first:row].astype(np.int64), before, following


def _begins_inside_a_character(student: TokenSequence, row: int) -> bool:
    start = student.byte_starts[row]
    return start < len(student.text) and is_continuation(student.text[start])
