"""``PrefixTargets``: a teacher's events at every boundary, and what of the student feeds each.

Made on the CPU (``prefix_preparation``), once per completion; ragged lists of numbers that a loss
gathers from, with no work left that depends on text.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

#: The group of no id in particular: a row as a whole, whose log-probability is 0.
WHOLE_ROW = 0

#: The path of no token, whose log-probability is 0.
NO_PATH = -1


@dataclass(frozen=True, eq=False)
class Readings:
    """Groups of student ids, each with where it is summed and which path leads to its row.

    Sorted by place.
    """

    places: Tensor  # int64 [n]
    columns: Tensor  # int64 [n], which event of the place
    positions: Tensor  # int64 [n]
    groups: Tensor  # int64 [n]; or WHOLE_ROW
    paths: Tensor  # int64 [n]; or NO_PATH

    def between(self, places: tuple[int, int], first_position: int, first_path: int) -> "Readings":
        """The part about some places, everything but groups counted from the given firsts."""
        first, last = torch.searchsorted(self.places, self.places.new_tensor(places)).tolist()
        part = slice(first, last)
        return Readings(
            places=self.places[part] - places[0],
            columns=self.columns[part],
            positions=self.positions[part] - first_position,
            groups=self.groups[part],
            paths=torch.where(self.paths[part] < 0, NO_PATH, self.paths[part] - first_path),
        )

    def to(self, device: torch.device | str) -> "Readings":
        """The same on a device."""
        return Readings(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class PrefixTargets:
    """Places in order of their positions; natural logs in float64, for a loss to round once.

    Spans (``prefix_spans``) are places like any other. An absent event has ``-inf``. A path is a
    run of the student's own tokens from the first row that is open at a place up to another one; a
    path belongs to one place, paths are in the places' order and their steps in the paths'. Group
    ``g`` of student ids, which many places may read, is
    ``group_ids[group_starts[g]:group_starts[g + 1]]``.
    """

    positions: Tensor  # int64 [places]: where the value stands
    first_positions: Tensor  # int64 [places]: the first position that is read
    are_spans: Tensor  # bool [places]: whether a span's way is compared, and no boundary
    events: Tensor  # float64 [places, events], nats: the teacher's, of all that it knows here
    rests: Tensor  # float64 [places], nats: all else that the teacher knows here
    path_masses: Tensor  # float64 [places]: how likely the teacher found the way here, at most 1
    weights: Tensor  # float64 [places]
    named: Readings  # what is summed for each event
    known: Readings  # what is summed for everything together
    path_places: Tensor  # int64 [paths]
    step_paths: Tensor  # int64 [steps]
    step_positions: Tensor  # int64 [steps]
    step_ids: Tensor  # int64 [steps], the student's own tokens
    group_starts: Tensor  # int64 [groups + 1]
    group_ids: Tensor  # int64; of WHOLE_ROW a single one that nothing is read for

    def to(self, device: torch.device | str) -> "PrefixTargets":
        """See ``Targets``."""
        return PrefixTargets(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def ids_of(self, readings: Readings) -> tuple[Tensor, Tensor]:
        """Each id that readings read, with the number of its reading: both int64 [ids read]."""
        starts = self.group_starts[readings.groups]
        counts = self.group_starts[readings.groups + 1] - starts
        numbers = torch.repeat_interleave(counts)
        shifts = starts - (counts.cumsum(0) - counts)
        entries = torch.arange(len(numbers), device=numbers.device) + shifts[numbers]
        return numbers, self.group_ids[entries]

    def between(self, start: int, stop: int) -> "PrefixTargets":
        """See ``Targets``; groups stay whole, for readings name them by number."""
        bounds = self.positions.new_tensor([start, stop])
        first, last = torch.searchsorted(self.positions, bounds).tolist()
        bounds = self.positions.new_tensor([first, last])
        first_path, last_path = torch.searchsorted(self.path_places, bounds).tolist()
        bounds = self.positions.new_tensor([first_path, last_path])
        first_step, last_step = torch.searchsorted(self.step_paths, bounds).tolist()
        places, steps = slice(first, last), slice(first_step, last_step)
        return replace(
            self,
            positions=self.positions[places] - start,
            first_positions=self.first_positions[places] - start,
            are_spans=self.are_spans[places],
            events=self.events[places],
            rests=self.rests[places],
            path_masses=self.path_masses[places],
            weights=self.weights[places],
            named=self.named.between((first, last), start, first_path),
            known=self.known.between((first, last), start, first_path),
            path_places=self.path_places[first_path:last_path] - first,
            step_paths=self.step_paths[steps] - first_path,
            step_positions=self.step_positions[steps] - start,
            step_ids=self.step_ids[steps],
        )

    def uncuttable(self, positions: int) -> Tensor:
        """See ``Targets``: a block may not end between rows that are read for one place."""
        firsts, lasts = self.first_positions.cpu(), self.positions.cpu()
        depth = torch.zeros(positions + 2, dtype=torch.int64)
        depth.index_add_(0, firsts + 1, torch.ones_like(firsts))
        depth.index_add_(0, lasts + 1, -torch.ones_like(lasts))
        return depth.cumsum(0)[: positions + 1] > 0
