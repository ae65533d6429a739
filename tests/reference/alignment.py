"""Alignment the slow way: try every pair of prefixes.

A tokenization is a list of tokens and a token is a tuple of symbols: its bytes as integers, or the
name of a control token as the only symbol.
"""

from itertools import pairwise

from mopd_protocol.tokenizers.token_sequence import TokenSequence

Token = tuple[int | str, ...]
Span = tuple[int, int, int, int]  # student start, student end, teacher start, teacher end


def tokens_of(sequence: TokenSequence) -> list[Token]:
    """List the bytes or control name of each token."""
    tokens: list[Token] = []
    start = 0
    for position, end in enumerate(sequence.byte_ends.tolist()):
        mark = sequence.marks.get(position)
        tokens.append(tuple(sequence.text[start:end]) if mark is None else (mark,))
        start = end
    return tokens


def spell(tokens: list[Token]) -> Token:
    """All symbols, one after the other."""
    return tuple(symbol for token in tokens for symbol in token)


def every_pair_of_prefixes(student: list[Token], teacher: list[Token]) -> list[Span]:
    """Spans between neighbouring cuts; a cut is a pair of prefixes that spell the same.

    For tokens that all spell something. Complete for equal texts; for texts that differ, these
    are the spans of their common prefix.
    """
    cuts = [
        (i, j)
        for i in range(len(student) + 1)
        for j in range(len(teacher) + 1)
        if spell(student[:i]) == spell(teacher[:j])
    ]
    return [(i, next_i, j, next_j) for (i, j), (next_i, next_j) in pairwise(cuts)]


def every_pair_of_suffixes(student: list[Token], teacher: list[Token]) -> list[Span]:
    """The spans of the common suffix of what is left after the whole common prefix."""
    prefix = common_prefix(spell(student), spell(teacher))
    cuts = [
        (i, j)
        for i in range(len(student) + 1)
        for j in range(len(teacher) + 1)
        if spell(student[i:]) == spell(teacher[j:])
        and len(spell(student[:i])) >= prefix
        and len(spell(teacher[:j])) >= prefix
    ]
    return [(i, next_i, j, next_j) for (i, j), (next_i, next_j) in pairwise(cuts)]


def common_prefix(left: Token, right: Token) -> int:
    """Count the symbols that two spellings share from the start."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length
