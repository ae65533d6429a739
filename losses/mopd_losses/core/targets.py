"""``RowTargets``: targets with one row per comparison, for losses to derive theirs from."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from mopd_losses.alignment.span_members import inside_spans

#: Fields that contain positions of the micro-batch, in increasing order.
_POSITIONS = ("positions", "student_starts", "student_ends")


@dataclass(frozen=True, eq=False)
class RowTargets:
    """``Targets`` whose fields are tensors with one row per comparison, in order of position.

    The first field contains the positions: ``positions``, or ``student_starts`` and
    ``student_ends`` of spans that a loss reads as a unit. Fields named in ``shared`` are the same
    for all rows.
    """

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of fields that are no columns of rows."""
        return ()

    def to(self, device: torch.device | str) -> Self:
        """See ``Targets``."""
        columns: Any = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return type(self)(**columns)

    def between(self, start: int, stop: int) -> Self:
        """See ``Targets``."""
        names = [field.name for field in fields(self)]
        starts: Tensor = getattr(self, names[0])
        first, last = torch.searchsorted(starts, starts.new_tensor([start, stop])).tolist()
        changes: Any = {
            name: getattr(self, name)[first:last] - (start if name in _POSITIONS else 0)
            for name in names
            if name not in self.shared
        }
        return replace(self, **changes)

    def uncuttable(self, positions: int) -> Tensor:
        """See ``Targets``: no block ends inside a span."""
        ends: Tensor | None = getattr(self, "student_ends", None)
        if ends is None:
            return torch.zeros(positions + 1, dtype=torch.bool)
        starts: Tensor = getattr(self, fields(self)[0].name)
        return inside_spans(starts, ends, positions)
