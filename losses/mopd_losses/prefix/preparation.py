"""The preparation of prefix KL: all that depends on text, on the CPU, without the student."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.boundaries import Integers, OpenRows, TokenizedText, boundaries_of
from mopd_losses.prefix.cells import Cells, teacher_cells
from mopd_losses.prefix.cuts import Cuts
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary, control_characters
from mopd_losses.prefix.targets import NO_PATH, WHOLE_ROW, PrefixTargets, RangeReadings
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


class Preparation:
    """Builds targets for one pair of tokenizers; caches what depends only on the pair."""

    def __init__(
        self, student: TokenTable, student_encoder: TextEncoder, teacher: TokenTable
    ) -> None:
        self._controls = control_characters(student, teacher)
        self.student = SortedVocabulary(student, self._controls)
        self._teacher = SortedVocabulary(teacher, self._controls)
        self._cuts = Cuts(self.student, student_encoder)

    def targets(
        self, comparisons: Sequence[AlignedPair], offsets: Sequence[int], *, mass_floor: float
    ) -> PrefixTargets:
        """Build the targets of several completions.

        Args:
            offsets: the first position of each completion.
            mass_floor: boundaries that the teacher reaches with a smaller mass weigh less.
        """
        parts = _Parts()
        for comparison, offset in zip(comparisons, offsets, strict=True):
            controls = dict(self._controls)
            student = TokenizedText.of(self.student, comparison.student, controls)
            teacher = TokenizedText.of(self._teacher, comparison.score.completion, controls)
            boundaries = boundaries_of(student, teacher)
            cells = teacher_cells(boundaries, comparison.score.topk, self._cuts)
            parts.add(student, boundaries.student_rows, cells, offset)
        return parts.targets(mass_floor)


class _Parts:
    """Columns of ``PrefixTargets``, with one array a completion."""

    def __init__(self) -> None:
        self._positions = [_NO_INTEGERS]
        self._first_positions = [_NO_INTEGERS]
        self._cell_boundaries = [_NO_INTEGERS]
        self._cell_columns = [_NO_INTEGERS]
        self._cell_nats = [_NO_NATS]
        self._rests = [_NO_NATS]
        self._masses = [_NO_NATS]
        self._named = [_NO_READINGS]
        self._known = [_NO_READINGS]
        self._path_boundaries = [_NO_INTEGERS]
        self._steps = [_NO_STEPS]
        self._boundaries = 0
        self._paths = 0

    def add(self, text: TokenizedText, rows: OpenRows, cells: Cells, offset: int) -> None:
        """Append one completion whose first position is ``offset``."""
        first_rows = rows.rows[rows.first]
        counts = rows.rows - first_rows[rows.boundaries]  # steps of each open row's path
        has_path = counts > 0
        paths = np.where(has_path, np.cumsum(has_path) - 1 + self._paths, NO_PATH)
        numbers = np.repeat(np.arange(len(counts)), counts)
        step_rows = first_rows[rows.boundaries][numbers] + _ranks_in_runs(counts)
        ids = np.array(text.ids, dtype=np.int64)
        steps = np.stack([paths[numbers], step_rows + offset, ids[step_rows]], axis=1)

        known_stops = np.where([not begun for begun in rows.begun], WHOLE_ROW, rows.stops)
        boundaries = rows.boundaries + self._boundaries
        positions = rows.rows + offset
        zeros = np.zeros(len(counts), dtype=np.int64)
        known = np.stack([boundaries, zeros, positions, rows.starts, known_stops, paths], axis=1)[
            (known_stops == WHOLE_ROW) | (rows.starts < rows.stops)
        ]

        columns = _ranks_in_runs(np.bincount(cells.boundaries, minlength=len(rows.first)))
        read, at, ranges = _student_ranges(text.vocabulary, rows, cells)
        named = np.column_stack(
            [boundaries[at], columns[read], positions[at], ranges, paths[at]]
        ).astype(np.int64)

        self._positions.append(rows.rows[rows.last] + offset)
        self._first_positions.append(first_rows + offset)
        self._cell_boundaries.append(cells.boundaries + self._boundaries)
        self._cell_columns.append(columns)
        self._cell_nats.append(cells.nats)
        self._rests.append(cells.rests)
        self._masses.append(cells.masses)
        self._named.append(named.reshape(-1, 6))
        self._known.append(known)
        self._path_boundaries.append(boundaries[has_path])
        self._steps.append(steps)
        self._boundaries += len(rows.first)
        self._paths += int(has_path.sum())

    def targets(self, mass_floor: float) -> PrefixTargets:
        """Join all completions."""
        columns = np.concatenate(self._cell_columns)
        shape = (self._boundaries, int(columns.max(initial=-1)) + 1)
        cells = torch.full(shape, -torch.inf, dtype=torch.float64)
        cells[np.concatenate(self._cell_boundaries), columns] = _joined(self._cell_nats)
        masses = _joined(self._masses).exp().clamp_max(1.0)
        step_paths, step_positions, step_ids = _joined(self._steps).T.contiguous()
        return PrefixTargets(
            positions=_joined(self._positions),
            first_positions=_joined(self._first_positions),
            cells=cells,
            rests=_joined(self._rests),
            path_masses=masses,
            weights=(masses / mass_floor).clamp_max(1.0) if mass_floor else torch.ones_like(masses),
            named=RangeReadings(*_joined(self._named).T.contiguous()),
            known=RangeReadings(*_joined(self._known).T.contiguous()),
            path_boundaries=_joined(self._path_boundaries),
            step_paths=step_paths,
            step_positions=step_positions,
            step_ids=step_ids,
        )


def _student_ranges(
    vocabulary: SortedVocabulary, rows: OpenRows, cells: Cells
) -> tuple[list[int], list[int], NDArray[np.int64]]:
    """The number of the cell, the number of the open row and the ranks of each range to read."""
    first, last, begun = rows.first.tolist(), rows.last.tolist(), rows.begun
    read, at = list[int](), list[int]()
    ranges: list[tuple[int, int]] = []
    for cell, (text, boundary) in enumerate(
        zip(cells.texts, cells.boundaries.tolist(), strict=True)
    ):
        for row in range(first[boundary], last[boundary] + 1):
            start, _, stop = vocabulary.range_of(begun[row] + text)
            if start < stop:
                read.append(cell)
                at.append(row)
                ranges.append((start, stop))
    return read, at, np.array(ranges, dtype=np.int64).reshape(-1, 2)


def _ranks_in_runs(lengths: Integers) -> Integers:
    """0, 1, … within each run of the given lengths."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _joined(parts: Sequence[NDArray[np.int64] | NDArray[np.float64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


_NO_INTEGERS = np.zeros(0, dtype=np.int64)
_NO_NATS = np.zeros(0)
_NO_READINGS = np.zeros((0, 6), dtype=np.int64)
_NO_STEPS = np.zeros((0, 3), dtype=np.int64)
