"""The teacher's cells at every boundary of a completion, and their masses.

A cell is text that may follow a boundary. The cells of one boundary are disjoint events of text for
any tokenizers (``names``); everything else is one event, the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import Boundaries, Integers, TokenizedText
from mopd_losses.prefix.cuts import Cuts
from mopd_losses.prefix.detours import CellDetours, Detours
from mopd_losses.prefix.names import CellNames, name_cells
from mopd_losses.prefix.separate_tokens import SeparateTokens
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary
from mopd_protocol.topk_logprobs import TopKLogprobs

Nats = NDArray[np.float64]

#: Least share of the teacher's mass at a boundary with which a candidate names a cell.
NAMING_SHARE = 1e-3

#: Least share of the teacher's mass at a boundary with which a cell's detours are sought.
DETOUR_SHARE = 1e-2

#: Nats in place of -inf, for a realised token that the teacher excludes: sums stay finite.
_EXCLUDED = -1e4


@dataclass(frozen=True, eq=False)
class Cells:
    """A teacher's distribution on (cells, rest) at each boundary."""

    names: CellNames
    likely: NDArray[np.bool_]  # [cells], whether detours are worth finding
    nats: Nats  # [cells], of the teacher's mass at the boundary
    rests: Nats  # [boundaries], of the same
    masses: Nats  # [boundaries], nats: of the text since the first open row
    texts: Nats  # [boundaries], nats: of the text since the first boundary's first open row
    detours: Nats  # [boundaries], of the teacher's mass: what cells with a detour may lack
    lacking: NDArray[np.bool_]  # [cells], whether the teacher reaches the cell by a detour


def teacher_cells(
    boundaries: Boundaries,
    topk: TopKLogprobs,
    cuts: Cuts,
    separate: SeparateTokens,
    student_detours: Detours,
    detours: Detours,
) -> Cells:
    """Build the cells that a teacher's top-k names, and the cell of the realised text.

    Args:
        detours: of the teacher's tokenizer.
    """
    rows = _TeacherRows.of(boundaries, topk)
    masses = _logsumexp(rows.paths + rows.masses(), rows.boundaries, len(boundaries))
    masses = np.maximum(masses, _EXCLUDED)

    def whole(texts: Mapping[int, str]) -> set[int]:
        by_student = student_detours.whole(boundaries.student, boundaries.student_rows, texts)
        return by_student & detours.whole(boundaries.teacher, boundaries.teacher_rows, texts)

    names = name_cells(rows.candidates(masses), boundaries, cuts, separate, whole)
    nats = rows.range_masses(names) - masses[names.boundaries]
    likely = nats >= np.log(DETOUR_SHARE)
    shorter = rows.shorter_tokens(boundaries.teacher)
    detoured = detours.of(boundaries.teacher, boundaries.teacher_rows, names, likely, shorter)
    lacking, counted = rows.detour_masses(detoured)
    with np.errstate(divide="ignore"):
        reduction = np.log1p(-np.minimum(np.exp(counted - masses), 1.0))
    reduction = np.maximum(reduction, _EXCLUDED)
    nats -= reduction[names.boundaries]
    masses += reduction
    named = np.bincount(names.boundaries, weights=np.exp(nats), minlength=len(boundaries))
    with np.errstate(divide="ignore"):
        rests = np.log(np.clip(1.0 - named, 0.0, None))
    texts = rows.starts + masses
    return Cells(names, likely, nats, rests, masses, texts, lacking - masses, detoured.cells)


@dataclass(frozen=True, eq=False)
class _TeacherRows:
    """The open rows of a teacher about which its top-k has information."""

    vocabulary: SortedVocabulary
    boundaries: Integers  # [rows]
    first: Integers  # [boundaries], index of the first row
    begun: list[str]  # [rows]
    ids: Integers  # [rows, k + 1], the top-k, and the realised token if it is outside
    ranks: Integers  # [rows, k + 1], -1 if missing
    nats: Nats  # [rows, k + 1]
    counted: NDArray[np.bool_]  # [rows, k + 1], what is mass of the row at its boundary
    reaching: NDArray[np.bool_]  # [rows, k + 1], what reaches beyond the boundary
    paths: Nats  # [rows], the realised tokens from the boundary's first row up to this one
    topk_ids: Integers  # [all rows, k + 1]
    topk_nats: Nats  # [all rows, k + 1]
    tails: Nats  # [all rows], of what is not in the top-k
    starts: Nats  # [boundaries], the realised tokens up to the boundary's first row
    sums: Nats  # [all rows + 1], the realised tokens up to each row

    @classmethod
    def of(cls, boundaries: Boundaries, topk: TopKLogprobs) -> "_TeacherRows":
        rows, vocabulary = boundaries.teacher_rows, boundaries.teacher.vocabulary
        ids, nats = _with_realised(boundaries.teacher.ids, topk)
        known = (ids >= 0) & (ids < len(vocabulary.ranks))
        ranks = np.where(known, vocabulary.ranks[np.where(known, ids, 0)], -1)
        counted, reaching = (
            (ranks[rows.rows] >= lowest[:, None]) & (ranks[rows.rows] < rows.stops[:, None])
            for lowest in (rows.starts, rows.longer)
        )
        is_last = np.zeros(len(rows.rows), dtype=np.bool_)
        is_last[rows.last] = True
        kept = np.flatnonzero(is_last | reaching.any(axis=1))
        numbers, kept_rows = rows.boundaries[kept], rows.rows[kept]
        first = np.searchsorted(numbers, np.arange(len(boundaries)))
        realised = np.maximum(topk.token_logprobs.astype(np.float64), _EXCLUDED)
        sums = np.concatenate([[0.0], np.cumsum(realised)])
        return cls(
            vocabulary=vocabulary,
            boundaries=numbers,
            first=first,
            begun=[rows.begun[index] for index in kept.tolist()],
            ids=ids[kept_rows],
            ranks=ranks[kept_rows],
            nats=nats[kept_rows],
            counted=counted[kept],
            reaching=reaching[kept],
            paths=sums[kept_rows] - sums[kept_rows[first]][numbers],
            topk_ids=ids,
            topk_nats=nats,
            tails=topk.tail_logprobs.astype(np.float64),
            starts=sums[kept_rows[first]],
            sums=sums,
        )

    def masses(self) -> Nats:
        """[rows], nats: everything that is open in each row; a row that begins at its boundary is
        completely open, tail included."""
        begins_here = np.array([not begun for begun in self.begun], dtype=np.bool_)
        return np.where(begins_here, 0.0, _logsumexp_rows(self.nats, self.counted))

    def shorter_tokens(self, text: TokenizedText) -> dict[int, list[int]]:
        """Row -> likely tokens of the top-k with which the realised one begins."""
        starts, realised = text.starts.tolist(), np.diff(self.sums)
        likely = self.topk_nats >= np.minimum(realised, 0.0)[:, None] + np.log(NAMING_SHARE)
        tokens: dict[int, list[int]] = {}
        rows, columns = np.nonzero(likely & (self.topk_ids >= 0))
        for row, token in zip(rows.tolist(), self.topk_ids[rows, columns].tolist(), strict=True):
            string = self.vocabulary.strings[token]
            if string and token != text.ids[row] and text.symbols.startswith(string, starts[row]):
                tokens.setdefault(row, []).append(token)
        return tokens

    def detour_masses(self, detours: CellDetours) -> tuple[Nats, Nats]:
        """[boundaries] each, nats: the tokens of all detours, and those that ``masses`` counts."""
        matches = self.topk_ids[detours.rows] == detours.ids[:, None]
        present = matches.any(axis=1)
        known = _logsumexp_rows(self.topk_nats[detours.rows], matches)
        nats = np.where(present, known, self.tails[detours.rows])
        nats += self.sums[detours.rows] - self.starts[detours.boundaries]
        counted = np.where(detours.counted & present, nats, -np.inf)
        count = len(self.first)
        numbers = detours.boundaries
        return _logsumexp(nats, numbers, count), _logsumexp(counted, numbers, count)

    def candidates(self, masses: Nats) -> list[dict[str, bool]]:
        """[boundaries], the strings beyond each boundary of the top-k's likely tokens, and whether
        detours to them are worth finding.

        Args:
            masses: [boundaries], nats, of what is open.
        """
        shares = self.nats + (self.paths - masses[self.boundaries])[:, None]
        at, columns = np.nonzero(self.reaching & (shares >= np.log(NAMING_SHARE)))
        by_boundary: list[dict[str, bool]] = [{} for _ in range(len(self.first))]
        ids, likely = self.ids[at, columns], shares[at, columns] >= np.log(DETOUR_SHARE)
        entries = at.tolist(), ids.tolist(), self.boundaries[at].tolist(), likely.tolist()
        for row, token, number, is_likely in zip(*entries, strict=True):
            text = self.vocabulary.strings[token][len(self.begun[row]) :]
            by_boundary[number][text] = is_likely or by_boundary[number].get(text, False)
        return by_boundary

    def range_masses(self, names: CellNames) -> Nats:
        """[cells], nats: the tokens of all rows of a boundary that continue with each cell."""
        cells, rows, ranges = names.ranges(self.vocabulary, self.begun, self.first)
        # Cells are disjoint: an entry is in the last range of its row that begins before it, or in
        # none. The range of no cell comes first.
        starts, stops = np.concatenate(
            [[[-1, -1]], rows[:, None] * len(self.vocabulary) + ranges]
        ).T
        order = np.argsort(starts)
        at, columns = np.nonzero(self.reaching)
        entries = at * len(self.vocabulary) + self.ranks[at, columns]
        latest = order[np.searchsorted(starts[order], entries, side="right") - 1]
        inside = entries < stops[latest]
        at, columns, ranges_of_entries = at[inside], columns[inside], latest[inside] - 1
        return _logsumexp(
            self.nats[at, columns] + self.paths[at], cells[ranges_of_entries], len(names.texts)
        )


def _with_realised(token_ids: list[int], topk: TopKLogprobs) -> tuple[Integers, Nats]:
    """Ids and nats of the top-k, with the realised token as one more entry if it is outside."""
    realised = np.array(token_ids, dtype=np.int64)[:, None]
    ids = topk.ids.astype(np.int64)
    outside = ~(ids == realised).any(axis=1, keepdims=True)
    nats = topk.token_logprobs.astype(np.float64)[:, None]
    return (
        np.concatenate([ids, np.where(outside, realised, -1)], axis=1),
        np.concatenate(
            [topk.logprobs.astype(np.float64), np.where(outside, nats, -np.inf)], axis=1
        ),
    )


def _logsumexp_rows(nats: Nats, counted: NDArray[np.bool_]) -> Nats:
    """[rows], over the counted entries of each row; -inf for none."""
    terms = np.where(counted, nats, -np.inf)
    peaks = terms.max(axis=1, initial=-np.inf)
    shifts = np.where(np.isneginf(peaks), 0.0, peaks)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(terms - shifts[:, None]).sum(axis=1)) + shifts


def _logsumexp(terms: Nats, segments: Integers, count: int) -> Nats:
    """[count], -inf for a segment without terms."""
    peaks = np.full(count, -np.inf)
    np.maximum.at(peaks, segments, terms)
    shifts = np.where(np.isneginf(peaks), 0.0, peaks)
    sums = np.bincount(segments, weights=np.exp(terms - shifts[segments]), minlength=count)
    with np.errstate(divide="ignore"):
        return np.log(sums) + shifts
