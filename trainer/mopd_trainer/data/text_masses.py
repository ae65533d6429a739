"""The probability that a teacher gives to the text of a completion, in any of its tokens.

A student may end a token where its teacher would not: the teacher has `` 20``, and the student
sampled a space so far. The teacher's own token for that space is unlikely, and yet the text is not:
all tokens that begin with it count. So the mass of the text up to a byte is

    M(byte) = sum over rows r before it of p(tokens before r) * sum of p(token | r)

over the tokens that begin with the text from row r up to the byte. What the top-k omits, and other
divisions of the text before a row, are missing, so that it is a lower bound.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import IntArray
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.data.tempering import Nats, tempered

#: Least probability of a token that counts.
_LEAST_SHARE = 1e-3


def text_masses(
    score: TeacherScore, table: TokenTable, ends: IntArray, temperature: float
) -> tuple[Nats, Nats]:
    """Return log-masses of a completion's text.

    Args:
        table: of the teacher.
        ends: [ends], tokens of the teacher, ascending: the text up to which to find the mass.
        temperature: of the teacher's distributions.

    Returns:
        [tokens + 1], nats, of the text in its tokens; and [ends], at most 0, in any tokens.
    """
    completion = score.completion
    all_nats = np.column_stack([score.logprobs, score.topk.logprobs])
    all_nats = tempered(all_nats, score.topk, temperature)
    written, nats = np.concatenate([[0.0], np.cumsum(all_nats[:, 0])]), all_nats[:, 1:]
    masses = written[ends]
    byte_ends = completion.byte_ends.astype(np.int64)
    starts = completion.byte_starts.astype(np.int64)
    rows, columns = _longer_tokens(score, table, starts, nats)
    controls = np.array(sorted(completion.marks), dtype=np.int64)
    last = np.append(controls, len(completion))[np.searchsorted(controls, rows)]
    first = np.searchsorted(ends, rows, side="right")
    entries = zip(rows.tolist(), columns.tolist(), last.tolist(), first.tolist(), strict=True)
    spelled = table.all_bytes
    for row, column, stop, index in entries:
        token = spelled[score.topk.ids[row, column]]
        mass = written[row] + nats[row, column]
        while index < len(ends) and ends[index] <= stop:
            if not token.startswith(completion.text[starts[row] : byte_ends[ends[index] - 1]]):
                break
            masses[index] = np.logaddexp(masses[index], mass)
            index += 1
    return written, np.minimum(masses, 0.0)


def _longer_tokens(
    score: TeacherScore, table: TokenTable, starts: NDArray[np.int64], nats: Nats
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select entries of the top-k that may begin with the realised token: others that are at least
    as long and begin with the same byte."""
    completion, ids = score.completion, score.topk.ids
    text = np.frombuffer(completion.text + b"\0", dtype=np.uint8)
    known = (ids >= 0) & (ids < table.size) & (ids != completion.token_ids[:, None])
    known &= nats >= math.log(_LEAST_SHARE)
    known[list(completion.marks)] = False
    rows, columns = np.nonzero(known)
    chosen = ids[rows, columns]
    lengths, own = table.byte_lengths[chosen], completion.byte_ends[rows] - starts[rows]
    at = np.flatnonzero((lengths > 0) & (lengths >= own))
    same = table.data[table.offsets[chosen[at]]] == text[starts[rows[at]]]
    return rows[at[same]], columns[at[same]]
