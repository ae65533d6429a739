"""The tokens of a tokenizer of bytes that merges, by trials of all tokens."""

from collections.abc import Sequence
from itertools import pairwise

#: Left and right parts, first merge first.
Merges = Sequence[tuple[str, str]]


def following(merges: Merges, token: str, prefix: str, count: int) -> list[str]:
    """The tokens, those that are merged first, that begin with a string, continue it, and stay as
    they are behind a token."""
    results: list[str] = []
    for whole in dict.fromkeys(left + right for left, right in merges):
        is_longer = len(results) < count and whole.startswith(prefix) and whole != prefix
        if is_longer and merged(merges, token + whole) == [token, whole]:
            results.append(whole)
    return results


def merged(merges: Merges, text: str, left: int = 1) -> list[str]:
    """The tokens of a text by merges: the first pair of the earliest merge, until there is none or
    so many tokens are left."""
    tokens = [*text]
    while len(tokens) > left:
        pairs = [*pairwise(tokens)]
        known = [pair for pair in pairs if pair in merges]
        if not known:
            break
        at = pairs.index(min(known, key=merges.index))
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
    return tokens


def dividing(merges: Merges, token: str) -> list[str]:
    """Texts behind which the tokenizer may begin with less than a token: the ends of tokens that
    stay as they are behind a beginning of it, or behind the first of two parts of its end."""
    parts: dict[int, str] = {}
    end, rest = 0, token
    while len(rest) > 1 and merged(merges, rest) == [rest]:
        first, rest = merged(merges, rest, left=2)
        end += len(first)
        parts[end] = first
    results: list[str] = []
    for end in range(1, len(token)):
        for part in dict.fromkeys([token[:end], parts.get(end, token[:end])]):
            if part in {*"".join(map("".join, merges)), *map("".join, merges)}:
                results += [t[len(token) - end :] for t in following(merges, part, token[end:], 1)]
    return results
