"""The interface of every loss: aligned pairs to targets, targets to nats per student token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_protocol.arrays import FloatArray
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True, eq=False)
class Lookahead:
    """The teacher's distributions behind a token that the completion does not continue with, and
    behind the likely tokens that follow it inside a token of the student."""

    student_row: int  # whose token would cover the end of the teacher's
    teacher_row: int  # that the token is from
    following: TopKLogprobs  # one row behind each token
    token_ids: tuple[int, ...] = ()  # the teacher's, behind that token: one per row but the last


@dataclass(frozen=True, eq=False)
class AlignedPair:
    """One completion in the student's tokens and in one teacher's, with that teacher's scores."""

    student: TokenSequence  # one position a token
    # [tokens], nats, under the weights that sampled the completion; None if it was not sampled
    sampled_logprobs: FloatArray | None
    score: TeacherScore
    alignment: Alignment
    lookaheads: tuple[Lookahead, ...] | None = None  # None if none were requested


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Nats per student token, unreduced: only the trainer divides, by the step's token count.

    ``compared`` is the share of each token that is compared with the teacher: 1, 0 where nothing
    is, or a weight between them. A token is compared if its probability enters the loss.
    ``measured`` contains detached vectors with one value per comparison, for means and
    percentiles over a step.
    """

    per_token: Float[Tensor, "tokens"]  # nats; zero, with a graph, where nothing is compared
    compared: Float[Tensor, "tokens"]  # 0 to 1, detached
    measured: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> [compared]


@runtime_checkable
class Targets(Protocol):
    """Tensors that a loss compares the student with, for all positions of a micro-batch."""

    def to(self, device: torch.device | str) -> "Targets":
        """Copy to a device."""
        ...

    def between(self, start: int, stop: int) -> "Targets":
        """Select positions ``[start, stop)``, renumbered from ``start``."""
        ...

    def uncuttable(self, positions: int) -> Tensor:
        """Return bool [positions + 1] on the CPU: True where no block of positions may end,
        because a loss reads the positions on both sides together."""
        ...


@runtime_checkable
class Loss(Protocol):
    """A divergence of the student from one teacher."""

    def targets(self, comparisons: Sequence[AlignedPair], offsets: Sequence[int]) -> Targets:
        """Build the targets of several completions.

        Args:
            offsets: the first position of each completion in the micro-batch; increasing.
        """
        ...

    def __call__(self, student: StudentLogprobs, targets: Any) -> LossOutput:
        """Return nats per position, for targets (or a part of them) that this loss has built."""
        ...
