"""Joins and selections of ``PrefixTargets`` by boundary."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mopd_losses.prefix.targets import NO_PATH, PrefixTargets, RangeReadings


def joined(first: PrefixTargets, second: PrefixTargets) -> PrefixTargets:
    """Return the boundaries of both, in the order of their positions."""
    boundaries, paths = len(first.positions), len(first.path_boundaries)
    width = max(first.cells.shape[1], second.cells.shape[1])

    def shifted(readings: RangeReadings) -> RangeReadings:
        moved = torch.where(readings.paths == NO_PATH, NO_PATH, readings.paths + paths)
        return replace(readings, boundaries=readings.boundaries + boundaries, paths=moved)

    second = replace(
        second,
        named=shifted(second.named),
        known=shifted(second.known),
        bounding=shifted(second.bounding),
        path_boundaries=second.path_boundaries + boundaries,
        step_paths=second.step_paths + paths,
    )
    columns: dict[str, Any] = {
        field.name: _concatenated([getattr(each, field.name) for each in (first, second)], width)
        for field in fields(PrefixTargets)
    }
    both = PrefixTargets(**columns)
    return selected(both, both.positions.argsort(stable=True))


def selected(targets: PrefixTargets, order: Int64[Tensor, "selected"]) -> PrefixTargets:
    """Return the boundaries with these numbers, in this order."""
    numbers = torch.full((len(targets.positions),), -1)
    numbers[order] = torch.arange(len(order))
    path_order = _order(numbers[targets.path_boundaries])
    paths = torch.full((len(targets.path_boundaries) + 1,), NO_PATH)  # the last one is NO_PATH
    paths[path_order] = torch.arange(len(path_order))
    step_order = _order(paths[targets.step_paths])

    def readings(each: RangeReadings) -> RangeReadings:
        kept = each.at(_order(numbers[each.boundaries]))
        return replace(kept, boundaries=numbers[kept.boundaries], paths=paths[kept.paths])

    return replace(
        targets.at_boundaries(order),
        named=readings(targets.named),
        known=readings(targets.known),
        bounding=readings(targets.bounding),
        path_boundaries=numbers[targets.path_boundaries[path_order]],
        step_paths=paths[targets.step_paths[step_order]],
        step_positions=targets.step_positions[step_order],
        step_ids=targets.step_ids[step_order],
    )


def _order(numbers: Tensor) -> Tensor:
    """Indices of the numbers from 0 on, ascending."""
    order = numbers.argsort(stable=True)
    return order[int((numbers < 0).sum()) :]


def _concatenated(parts: Sequence[Tensor | RangeReadings], width: int) -> Tensor | RangeReadings:
    first, second = parts
    if isinstance(first, RangeReadings):
        return RangeReadings(
            **{
                field.name: torch.cat([getattr(first, field.name), getattr(second, field.name)])
                for field in fields(RangeReadings)
            }
        )
    if first.ndim == 2:  # cells
        missing = -torch.inf if first.is_floating_point() else False
        first, second = (
            torch.nn.functional.pad(each, (0, width - each.shape[1]), value=missing)
            for each in (first, second)
        )
    return torch.cat([first, second])
