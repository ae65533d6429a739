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
from mopd_losses.prefix.detours import CellDetours, Detours
from mopd_losses.prefix.separate_tokens import SeparateTokens
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary, control_characters
from mopd_losses.prefix.targets import NO_PATH, WHOLE_ROW, PrefixTargets, RangeReadings
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


class Preparation:
    """Builds targets for one pair of tokenizers; caches what depends only on the pair."""

    def __init__(
        self,
        student: TokenTable,
        student_encoder: TextEncoder,
        teacher: TokenTable,
        teacher_encoder: TextEncoder,
    ) -> None:
        self._controls = control_characters(student, teacher)
        self.student = SortedVocabulary(student, self._controls)
        self._teacher = SortedVocabulary(teacher, self._controls)
        self._cuts = Cuts(self.student, student_encoder)
        self._separate = SeparateTokens(
            self.student, student_encoder, self._teacher, teacher_encoder
        )
        self._student_detours = Detours(self.student, student_encoder)
        self._teacher_detours = Detours(self._teacher, teacher_encoder)

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
            boundaries = boundaries_of(student, teacher, comparison.alignment.blocks)
            topk = comparison.score.topk
            cells = teacher_cells(
                boundaries,
                topk,
                self._cuts,
                self._separate,
                self._student_detours,
                self._teacher_detours,
            )
            rows = boundaries.student_rows
            detours = self._student_detours.of(student, rows, cells.names, cells.likely)
            parts.add(student, rows, cells, detours, offset)
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
        self._token_masses = [_NO_NATS]
        self._named = [_NO_READINGS]
        self._known = [_NO_READINGS]
        self._detours = [_NO_READINGS]
        self._lacking = [_NO_FLAGS]
        self._teacher_detours = [_NO_NATS]
        self._teacher_lacking = [_NO_FLAGS]
        self._path_boundaries = [_NO_INTEGERS]
        self._steps = [_NO_STEPS]
        self._boundaries = 0
        self._paths = 0

    def add(
        self, text: TokenizedText, rows: OpenRows, cells: Cells, detours: CellDetours, offset: int
    ) -> None:
        """Append one completion whose first position is ``offset``."""
        first_rows = rows.rows[rows.first]
        np.minimum.at(first_rows, detours.boundaries, detours.rows)
        # A path for each open row and each detour, in the order of boundaries.
        path_boundaries = np.concatenate([rows.boundaries, detours.boundaries])
        path_rows = np.concatenate([rows.rows, detours.rows])
        order = np.argsort(path_boundaries, kind="stable")
        counts = (path_rows - first_rows[path_boundaries])[order]  # steps of each path
        has_path = counts > 0
        ordered = np.where(has_path, np.cumsum(has_path) - 1 + self._paths, NO_PATH)
        paths = np.empty_like(ordered)
        paths[order] = ordered
        numbers = np.repeat(np.arange(len(counts)), counts)
        step_rows = first_rows[path_boundaries[order]][numbers] + _ranks_in_runs(counts)
        ids = np.array(text.ids, dtype=np.int64)
        steps = np.stack([ordered[numbers], step_rows + offset, ids[step_rows]], axis=1)

        boundaries = rows.boundaries + self._boundaries
        positions = rows.rows + offset
        stops = np.where([not begun for begun in rows.begun], WHOLE_ROW, rows.stops)
        at = np.flatnonzero((stops == WHOLE_ROW) | (rows.starts < stops))
        zeros = np.zeros_like(at)
        known = np.stack(
            [boundaries[at], zeros, positions[at], rows.starts[at], stops[at], paths[at]], axis=1
        )

        columns = _ranks_in_runs(np.bincount(cells.names.boundaries, minlength=len(rows.first)))
        read, at, ranges = cells.names.ranges(text.vocabulary, rows.begun, rows.first)
        named = np.column_stack(
            [boundaries[at], columns[read], positions[at], ranges, paths[at]]
        ).astype(np.int64)

        ranks = text.vocabulary.ranks[detours.ids]
        detour_readings = np.column_stack(
            [
                detours.boundaries + self._boundaries,
                detours.counted,
                detours.rows + offset,
                ranks,
                ranks + 1,
                paths[len(rows.rows) :],
            ]
        )

        self._positions.append(rows.rows[rows.last] + offset)
        self._first_positions.append(first_rows + offset)
        self._cell_boundaries.append(cells.names.boundaries + self._boundaries)
        self._cell_columns.append(columns)
        self._cell_nats.append(cells.nats)
        self._rests.append(cells.rests)
        self._masses.append(cells.masses)
        self._token_masses.append(_token_masses(rows, cells.texts))
        self._named.append(named.reshape(-1, 6))
        self._known.append(known)
        self._detours.append(detour_readings.astype(np.int64))
        self._lacking.append(detours.cells)
        self._teacher_detours.append(cells.detours)
        self._teacher_lacking.append(cells.lacking)
        self._path_boundaries.append(path_boundaries[order][has_path] + self._boundaries)
        self._steps.append(steps)
        self._boundaries += len(rows.first)
        self._paths += int(has_path.sum())

    def targets(self, mass_floor: float) -> PrefixTargets:
        """Join all completions."""
        columns = np.concatenate(self._cell_columns)
        shape = (self._boundaries, int(columns.max(initial=-1)) + 1)
        cells = torch.full(shape, -torch.inf, dtype=torch.float64)
        at = np.concatenate(self._cell_boundaries), columns
        cells[at] = _joined(self._cell_nats)
        lacking, teacher_lacking = torch.zeros((2, *shape), dtype=torch.bool)
        lacking[at] = _joined(self._lacking)
        teacher_lacking[at] = _joined(self._teacher_lacking)
        masses = _joined(self._masses).exp().clamp_max(1.0)
        step_paths, step_positions, step_ids = _joined(self._steps).T.contiguous()
        return PrefixTargets(
            positions=_joined(self._positions),
            first_positions=_joined(self._first_positions),
            cells=cells,
            rests=_joined(self._rests),
            path_masses=masses,
            token_masses=_joined(self._token_masses),
            weights=(masses / mass_floor).clamp_max(1.0) if mass_floor else torch.ones_like(masses),
            named=RangeReadings(*_joined(self._named).T.contiguous()),
            known=RangeReadings(*_joined(self._known).T.contiguous()),
            detours=RangeReadings(*_joined(self._detours).T.contiguous()),
            lacking=lacking,
            teacher_detours=_joined(self._teacher_detours),
            teacher_lacking=teacher_lacking,
            path_boundaries=_joined(self._path_boundaries),
            step_paths=step_paths,
            step_positions=step_positions,
            step_ids=step_ids,
        )


def _token_masses(rows: OpenRows, texts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[boundaries], see ``PrefixTargets``."""
    covering = rows.rows[rows.last].tolist()
    begins = [not rows.begun[index] for index in rows.last.tolist()]
    numbered = [*zip(covering, texts, begins, strict=True)]
    starts = {row: text for row, text, is_start in numbered if is_start}
    before = [np.nan if is_start else starts.get(row, np.nan) for row, _, is_start in numbered]
    return texts - np.array(before)


def _ranks_in_runs(lengths: Integers) -> Integers:
    """0, 1, … within each run of the given lengths."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _joined(
    parts: Sequence[NDArray[np.int64] | NDArray[np.float64] | NDArray[np.bool_]],
) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


_NO_INTEGERS = np.zeros(0, dtype=np.int64)
_NO_NATS = np.zeros(0)
_NO_FLAGS = np.zeros(0, dtype=np.bool_)
_NO_READINGS = np.zeros((0, 6), dtype=np.int64)
_NO_STEPS = np.zeros((0, 3), dtype=np.int64)
