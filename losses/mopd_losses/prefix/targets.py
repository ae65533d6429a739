"""``PrefixTargets``: a teacher's cells at every boundary, and the student's ranges that feed them.

Built on the CPU (``preparation``), once per completion; nothing here depends on text any more.
"""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

#: The path of no token; its log-probability is 0.
NO_PATH = -1

#: The stop of a range that is a whole row; its log-probability is 0.
WHOLE_ROW = -1


@dataclass(frozen=True, eq=False)
class RangeReadings:
    """Ranges of the student's sorted vocabulary to sum. Sorted by boundary."""

    boundaries: Int64[Tensor, "n"]
    cells: Int64[Tensor, "n"]  # column of the cell at its boundary
    positions: Int64[Tensor, "n"]
    starts: Int64[Tensor, "n"]  # ranks
    stops: Int64[Tensor, "n"]  # exclusive; or WHOLE_ROW
    paths: Int64[Tensor, "n"]  # or NO_PATH

    def between(
        self, first: int, last: int, first_position: int, first_path: int
    ) -> "RangeReadings":
        """Select boundaries ``[first, last)``, with all numbers counted from the given firsts."""
        bounds = self.boundaries.new_tensor([first, last])
        start, stop = torch.searchsorted(self.boundaries, bounds).tolist()
        part = self.at(slice(start, stop))
        return replace(
            part,
            boundaries=part.boundaries - first,
            positions=part.positions - first_position,
            paths=torch.where(part.paths == NO_PATH, NO_PATH, part.paths - first_path),
        )

    def at(self, chosen: slice | Tensor) -> "RangeReadings":
        """Select readings, without renumbering."""
        return RangeReadings(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def to(self, device: torch.device | str) -> "RangeReadings":
        """Copy to a device."""
        return RangeReadings(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class PrefixTargets:
    """Boundaries in the order of their positions; natural logs in float64, rounded by the loss.

    A missing cell has ``-inf``. A path is a run of the student's sampled tokens, from the first
    row that is open at a boundary up to another open row; a path belongs to one boundary, paths are
    in the order of boundaries and steps in the order of paths.
    """

    positions: Int64[Tensor, "boundaries"]  # of the value: the last open row
    first_positions: Int64[Tensor, "boundaries"]  # the first open row
    cells: Float[Tensor, "boundaries cells"]  # nats, of the teacher's mass here
    rests: Float[Tensor, "boundaries"]  # nats, of the same: everything else
    path_masses: Float[Tensor, "boundaries"]  # the teacher's mass of the text so far, at most 1
    token_masses: Float[Tensor, "boundaries"]
    """Nats, the teacher's, of the text since the start of the student's token that covers the
    boundary; NaN where none does or its start is not compared."""
    in_every_sample: Bool[Tensor, "boundaries"]
    """True for the boundaries after open tokens (``lookaheads``), which every sample
    compares."""
    weights: Float[Tensor, "boundaries"]
    named: RangeReadings  # summed for each cell
    known: RangeReadings  # summed for everything that is open
    bounding: RangeReadings  # summed for what may be missing; column 1 if also in ``known``
    missing: Float[Tensor, "boundaries cells"]
    """Nats, of the teacher's mass of the cell: the most that is missing of the student's. -inf for
    a cell without a bounding token."""
    ends: Bool[Tensor, "boundaries cells"]  # the student's token that ends at the boundary
    teacher_bounds: Float[Tensor, "boundaries"]  # nats, of its mass: the most that is missing
    teacher_missing: Bool[Tensor, "boundaries cells"]
    path_boundaries: Int64[Tensor, "paths"]
    step_paths: Int64[Tensor, "steps"]
    step_positions: Int64[Tensor, "steps"]
    step_ids: Int64[Tensor, "steps"]

    def to(self, device: torch.device | str) -> "PrefixTargets":
        """See ``Targets``."""
        return PrefixTargets(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def between(self, start: int, stop: int) -> "PrefixTargets":
        """See ``Targets``."""
        first, last = _searched(self.positions, start, stop)
        first_path, last_path = _searched(self.path_boundaries, first, last)
        first_step, last_step = _searched(self.step_paths, first_path, last_path)
        steps = slice(first_step, last_step)
        part = self.at_boundaries(slice(first, last))
        return replace(
            part,
            positions=part.positions - start,
            first_positions=part.first_positions - start,
            named=self.named.between(first, last, start, first_path),
            known=self.known.between(first, last, start, first_path),
            bounding=self.bounding.between(first, last, start, first_path),
            path_boundaries=self.path_boundaries[first_path:last_path] - first,
            step_paths=self.step_paths[steps] - first_path,
            step_positions=self.step_positions[steps] - start,
            step_ids=self.step_ids[steps],
        )

    def at_boundaries(self, chosen: slice | Tensor) -> "PrefixTargets":
        """Select the columns of boundaries; readings, paths and steps stay as they are."""
        columns: dict[str, Tensor] = {name: getattr(self, name)[chosen] for name in _OF_BOUNDARIES}
        return replace(self, **columns)

    def uncuttable(self, positions: int) -> Tensor:
        """See ``Targets``: a block may not end between rows that are open at one boundary."""
        firsts, lasts = self.first_positions.cpu(), self.positions.cpu()
        depth = torch.zeros(positions + 2, dtype=torch.int64)
        depth.index_add_(0, firsts + 1, torch.ones_like(firsts))
        depth.index_add_(0, lasts + 1, -torch.ones_like(lasts))
        return depth.cumsum(0)[: positions + 1] > 0


#: Columns of ``PrefixTargets`` with an entry a boundary.
_OF_BOUNDARIES = (
    "positions",
    "first_positions",
    "cells",
    "rests",
    "path_masses",
    "token_masses",
    "in_every_sample",
    "weights",
    "missing",
    "ends",
    "teacher_bounds",
    "teacher_missing",
)


def _searched(ascending: Tensor, start: int, stop: int) -> tuple[int, int]:
    first, last = torch.searchsorted(ascending, ascending.new_tensor([start, stop])).tolist()
    return first, last
