"""Corrections of completions from their definition, one token at a time."""

from collections.abc import Sequence

Row = tuple[bytes, float, Sequence[tuple[bytes, float]]]
"""A teacher's token and its probability, and the likely tokens, likeliest first, with theirs."""


def correction(
    student: Sequence[tuple[bytes, Sequence[bytes]]],
    teacher: Sequence[Row],
    least_ratio: float,
    significance: float,
) -> list[bytes] | None:
    """Return the first tokens of the corrected completion; None if it stays as it is.

    The target is the text before an implausible token with the teacher's likeliest one in its
    place. Tokens that end before the implausible one stay, but for the last one, if a likely token
    in its place is long enough for all of the target. Behind them each student token is the
    likeliest other one with which the text begins with the target, but with no longer token of the
    teacher's row, or else the likeliest one with which the target begins with the text.

    The completion stays as it is if the teacher's own text up to the implausible token would have
    ``significance`` such tokens or more, on average.

    Args:
        student: its tokens, each with the likeliest ones in its place, in order.
        teacher: its tokens of the same text.
    """
    before = b""
    expected = 0.0
    for token, probability, likely in teacher:
        (likeliest, highest), *others = likely
        expected += 1 - sum(each for _, each in likely if each >= least_ratio * highest)
        if probability < least_ratio * highest:
            if expected >= significance:
                return None
            target = before + likeliest
            rivals = [
                before + other
                for other in [token, *(spelled for spelled, _ in others)]
                if len(other) > len(likeliest)
            ]
            ends = [b"".join(own for own, _ in student[: n + 1]) for n in range(len(student))]
            last = max((n for n, end in enumerate(ends) if len(end) <= len(before)), default=None)
            if last is not None:
                begun = ends[last - 1] if last else b""
                for each in student[last][1]:
                    text = begun + each
                    if text.startswith(target) and not any(map(text.startswith, rivals)):
                        return [*(own for own, _ in student[:last]), each]
            tokens: list[bytes] = []
            for own, candidates in student:
                text = b"".join(tokens)
                if len(text + own) <= len(before):
                    tokens.append(own)
                    continue
                completing = [
                    each
                    for each in candidates
                    if (text + each).startswith(target)
                    and each != own
                    and not any((text + each).startswith(rival) for rival in rivals)
                ]
                beginning = [
                    each
                    for each in candidates
                    if each and target.startswith(text + each) and text + each != target
                ]
                if not completing + beginning:
                    break
                tokens.append((completing + beginning)[0])
                if tokens[-1] != own:
                    return tokens
        before += token
    return None
