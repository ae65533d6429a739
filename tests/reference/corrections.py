"""Corrections of completions from their definition, one token at a time."""

from collections.abc import Sequence

Row = tuple[bytes, float, bytes, float]
"""A teacher's token and its probability, the likeliest token and its probability."""


def correction(
    student: Sequence[tuple[bytes, Sequence[bytes]]], teacher: Sequence[Row], least_ratio: float
) -> list[bytes] | None:
    """Return the first tokens of the corrected completion; None if it stays as it is.

    With the text before an implausible token and the teacher's likeliest one in its place, each
    student token is the likeliest that agrees with that text: one begins with the other. Tokens
    that end before the implausible one stay.

    Args:
        student: its tokens, each with the likeliest ones in its place, in order.
        teacher: its tokens of the same text.
    """
    before = b""
    for token, probability, likeliest, highest in teacher:
        if probability < least_ratio * highest:
            target = before + likeliest
            tokens: list[bytes] = []
            for own, candidates in student:
                text = b"".join(tokens)
                if len(text) >= len(target):
                    break
                if len(text + own) <= len(before):
                    tokens.append(own)
                    continue
                agreeing = [
                    each
                    for each in candidates
                    if each and (target.startswith(text + each) or (text + each).startswith(target))
                ]
                if not agreeing:
                    break
                tokens.append(agreeing[0])
                if agreeing[0] != own:
                    return tokens
        before += token
    return None
