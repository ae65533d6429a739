"""What every loss is: targets made of comparisons, and a value for every student token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_protocol.arrays import FloatArray
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence


@dataclass(frozen=True, eq=False)
class AlignedPair:
    """One completion, in the student's tokens and as one teacher scored it."""

    student: TokenSequence  # one slot a token
    # [tokens], nats, under the weights that wrote the completion; None where no student wrote it
    sampled_logprobs: FloatArray | None
    score: TeacherScore
    alignment: Alignment


@runtime_checkable
class Targets(Protocol):
    """What a loss compares the student with, for all slots of a micro-batch, as tensors."""

    def to(self, device: torch.device | str) -> "Targets":
        """The same on a device."""
        ...

    def between(self, start: int, stop: int) -> "Targets":
        """The part about slots ``[start, stop)``, with its slots counted from ``start``."""
        ...

    def uncuttable(self, slots: int) -> Tensor:
        """bool [slots + 1] on the CPU, True where no block of slots may end: inside a span that
        is read as one."""
        ...


@runtime_checkable
class Loss(Protocol):
    """A divergence of the student from one teacher."""

    def targets(self, comparisons: Sequence[AlignedPair], slot_offsets: Sequence[int]) -> Targets:
        """What the teacher says about several completions whose slots stand one after the other.

        Args:
            slot_offsets: the first slot of each completion; increasing.
        """
        ...

    def __call__(self, student: StudentLogprobs, targets: Any) -> LossOutput:
        """Nats per slot, for targets that this loss has made (or a part of them)."""
        ...
