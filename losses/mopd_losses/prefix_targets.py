"""``PrefixTargets``: a teacher's events at every boundary, and what of the student feeds each.

Made on the CPU (``prefix_events``), once per completion; ragged lists of numbers that a loss
gathers from, with no work left that depends on text.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Readings:
    """Student log-probabilities, each with where it is summed and which path leads to its row.

    Sorted by place.
    """

    places: Tensor  # int64 [n]
    columns: Tensor  # int64 [n], which event of the place
    slots: Tensor  # int64 [n]
    ids: Tensor  # int64 [n], student ids; -1 for the whole row, whose log-probability is 0
    paths: Tensor  # int64 [n]; -1 for the path of no token, whose log-probability is 0

    def between(self, places: tuple[int, int], first_slot: int, first_path: int) -> "Readings":
        """The part about some places, everything counted from the given firsts."""
        first, last = torch.searchsorted(self.places, self.places.new_tensor(places)).tolist()
        part = slice(first, last)
        return Readings(
            places=self.places[part] - places[0],
            columns=self.columns[part],
            slots=self.slots[part] - first_slot,
            ids=self.ids[part],
            paths=torch.where(self.paths[part] < 0, -1, self.paths[part] - first_path),
        )

    def to(self, device: torch.device | str) -> "Readings":
        """The same on a device."""
        return Readings(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class PrefixTargets:
    """Places in order of their slots; natural logs in float64, for a loss to round once.

    An absent event has ``-inf``. A path is a run of the student's own tokens from the first row
    that is open at a place up to another one; a path belongs to one place, paths are in the places'
    order and their steps in the paths'.
    """

    slots: Tensor  # int64 [places]: where the value stands
    first_slots: Tensor  # int64 [places]: the first slot that is read
    events: Tensor  # float64 [places, events], nats: the teacher's, of all that it knows here
    rests: Tensor  # float64 [places], nats: all else that the teacher knows here
    path_masses: Tensor  # float64 [places]: how likely the teacher found the way here, at most 1
    weights: Tensor  # float64 [places]
    named: Readings  # what is summed for each event
    known: Readings  # what is summed for everything together
    path_places: Tensor  # int64 [paths]
    step_paths: Tensor  # int64 [steps]
    step_slots: Tensor  # int64 [steps]
    step_ids: Tensor  # int64 [steps], the student's own tokens

    def to(self, device: torch.device | str) -> "PrefixTargets":
        """See ``Targets``."""
        return PrefixTargets(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def between(self, start: int, stop: int) -> "PrefixTargets":
        """See ``Targets``."""
        bounds = self.slots.new_tensor([start, stop])
        first, last = torch.searchsorted(self.slots, bounds).tolist()
        bounds = self.slots.new_tensor([first, last])
        first_path, last_path = torch.searchsorted(self.path_places, bounds).tolist()
        bounds = self.slots.new_tensor([first_path, last_path])
        first_step, last_step = torch.searchsorted(self.step_paths, bounds).tolist()
        places, steps = slice(first, last), slice(first_step, last_step)
        return replace(
            self,
            slots=self.slots[places] - start,
            first_slots=self.first_slots[places] - start,
            events=self.events[places],
            rests=self.rests[places],
            path_masses=self.path_masses[places],
            weights=self.weights[places],
            named=self.named.between((first, last), start, first_path),
            known=self.known.between((first, last), start, first_path),
            path_places=self.path_places[first_path:last_path] - first,
            step_paths=self.step_paths[steps] - first_path,
            step_slots=self.step_slots[steps] - start,
            step_ids=self.step_ids[steps],
        )

    def uncuttable(self, slots: int) -> Tensor:
        """See ``Targets``: a block may not end between rows that are read for one place."""
        firsts, lasts = self.first_slots.cpu(), self.slots.cpu()
        depth = torch.zeros(slots + 2, dtype=torch.int64)
        depth.index_add_(0, firsts + 1, torch.ones_like(firsts))
        depth.index_add_(0, lasts + 1, -torch.ones_like(lasts))
        return depth.cumsum(0)[: slots + 1] > 0
