"""One end a side, from complete distributions: the twin of ``mopd_losses.ends``."""

from collections.abc import Sequence

Row = list[float]  # probabilities by id


def pooled(row: Row, ends: Sequence[int]) -> Row:
    """Move the probability of all ids that end to the first of them."""
    result = [0.0 if token_id in ends else p for token_id, p in enumerate(row)]
    result[ends[0]] = sum(row[token_id] for token_id in ends)
    return result


def in_ids_of_student(row: Row, own: Sequence[int], others: Sequence[int]) -> Row:
    """A teacher's row in the ids of a student with the same vocabulary.

    Args:
        own: the student's ids that end.
        others: the teacher's.
    """
    only_own = sorted({*own} - {*others})
    only_others = sorted({*others} - {*own})
    result = [0.0] * len(row)
    for token_id, p in enumerate(row):
        if token_id in others:
            result[own[0]] += p
        elif token_id not in only_own:
            result[token_id] += p
        elif only_own.index(token_id) < len(only_others):
            result[only_others[only_own.index(token_id)]] += p
        else:
            result[own[0]] += p
    return result
