"""``ValidTextLoss``: a loss that also trains the student's tokens that no text can contain.

A student of bytes can produce tokens after which its bytes are no UTF-8. A teacher whose tokens
spell these bytes scores them, but a loss that compares spans or their first tokens need not read
that score, and for any other teacher the text ends before them: then they cost nothing, and descent
on a cross-tokenizer loss may lead to them. But the teacher's probability is known: text is valid,
so it is 0, and the divergence on (this token, all others) is

    KL = -ln(1 - p(token))

whose gradient on the token's logit is ``p``: the unlikelihood of Welleck et al. (arXiv 1908.04319).
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mopd_losses.core.loss import AlignedPair, Loss, LossOutput, Targets
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.core.targets import RowTargets
from mopd_losses.divergences.truncation import TAIL_MARGIN
from mopd_protocol.tokenizers.token_sequence import TokenSequence


@dataclass(frozen=True, eq=False)
class InvalidTokens(RowTargets):
    """Tokens that make a completion's bytes invalid."""

    positions: Int64[Tensor, "invalid"]
    ids: Int64[Tensor, "invalid"]


@dataclass(frozen=True, eq=False)
class ValidTextTargets:
    """Targets of a loss, and the invalid tokens."""

    inner: Targets
    invalid: InvalidTokens

    def to(self, device: torch.device | str) -> "ValidTextTargets":
        """See ``Targets``."""
        return ValidTextTargets(self.inner.to(device), self.invalid.to(device))

    def between(self, start: int, stop: int) -> "ValidTextTargets":
        """See ``Targets``."""
        inner = self.inner.between(start, stop)
        return ValidTextTargets(inner, self.invalid.between(start, stop))

    def uncuttable(self, positions: int) -> Tensor:
        """See ``Targets``."""
        return self.inner.uncuttable(positions)


@dataclass(frozen=True, eq=False)
class ValidTextLoss:
    """Another loss, plus ``-ln(1 - p)`` at tokens that make the text invalid: a ``Loss``.

    These tokens do not count as compared: no score of the teacher enters their value.
    """

    inner: Loss

    def targets(
        self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]
    ) -> ValidTextTargets:
        """See ``Loss``."""
        invalid = [
            (offset + position, int(pair.student.token_ids[position]))
            for pair, offset in zip(comparisons, offsets, strict=True)
            for position in invalid_positions(pair.student)
        ]
        positions, ids = torch.tensor(invalid, dtype=torch.int64).reshape(-1, 2).T.contiguous()
        return ValidTextTargets(
            self.inner.targets(comparisons, offsets), InvalidTokens(positions, ids)
        )

    def __call__(self, student: StudentLogprobs, targets: Any) -> LossOutput:
        """See ``Loss``."""
        output = self.inner(student, targets.inner)
        positions = targets.invalid.positions
        if not len(positions):
            return output
        logprobs = student.logprobs(positions, targets.invalid.ids)
        values = -torch.log(-torch.expm1(logprobs.clamp_max(math.log1p(-TAIL_MARGIN))))
        return LossOutput(
            output.per_token.index_add(0, positions, values),
            output.compared,
            output.measured,
        )


def invalid_positions(sequence: TokenSequence) -> list[int]:
    """Return the tokens after which the bytes of a completion cannot be the beginning of text.

    After each of them, text begins again. An end of the turn inside a character is one of them; a
    completion that is cut by its length is not.
    """
    if _is_valid(sequence):
        return []  # most completions, in a twentieth of the time
    decoder = codecs.getincrementaldecoder("utf-8")()
    positions: list[int] = []
    start = 0
    for position, stop in enumerate(sequence.byte_ends.tolist()):
        is_control = position in sequence.marks
        piece = b"" if is_control else sequence.text[start:stop]
        try:
            decoder.decode(piece, final=is_control)
        except UnicodeDecodeError:
            positions.append(position)
            # A character that begins at the end of this token may still be completed.
            lenient = codecs.getincrementaldecoder("utf-8")("replace")
            lenient.decode(piece)
            decoder.setstate(lenient.getstate())
        start = stop
    return positions


def _is_valid(sequence: TokenSequence) -> bool:
    """Return whether the bytes before, between and behind control tokens are text."""
    stops = [int(sequence.byte_ends[position]) for position in sequence.marks]
    try:
        for start, stop in pairwise([0, *stops, len(sequence.text)]):
            sequence.text[start:stop].decode()
    except UnicodeDecodeError:
        return False
    return True
