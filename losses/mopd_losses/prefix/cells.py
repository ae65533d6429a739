"""The teacher's cells at every boundary of a completion, and their masses.

A cell is a string that may follow a boundary. The cells of one boundary are prefix-free, so they
are disjoint events of text for any tokenizers; everything else is one event, the rest.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import Boundaries, Integers, OpenRows
from mopd_losses.prefix.cuts import Cuts
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary
from mopd_protocol.topk_logprobs import TopKLogprobs

Nats = NDArray[np.float64]

#: Least share of the teacher's mass at a boundary with which a candidate names a cell.
NAMING_SHARE = 1e-3

#: Nats in place of -inf, for a realised token that the teacher excludes: sums stay finite.
_EXCLUDED = -1e4


@dataclass(frozen=True, eq=False)
class Cells:
    """A teacher's distribution on (cells, rest) at each boundary."""

    texts: list[str]  # [cells]
    boundaries: Integers  # [cells], ascending
    nats: Nats  # [cells], of the teacher's mass at the boundary
    rests: Nats  # [boundaries], of the same
    masses: Nats  # [boundaries], nats: of the text since the first open row


def teacher_cells(boundaries: Boundaries, topk: TopKLogprobs, cuts: Cuts) -> Cells:
    """Build the cells that a teacher's top-k names, and the cell of the realised text."""
    rows = _TeacherRows.of(boundaries, topk)
    masses = _logsumexp(rows.paths + rows.masses(), rows.boundaries, len(boundaries))
    masses = np.maximum(masses, _EXCLUDED)
    texts, numbers = _name_cells(boundaries, rows, masses, cuts)
    nats = rows.range_masses(texts, numbers) - masses[numbers]
    named = np.bincount(numbers, weights=np.exp(nats), minlength=len(boundaries))
    with np.errstate(divide="ignore"):
        rests = np.log(np.clip(1.0 - named, 0.0, None))
    return Cells(texts, numbers, nats, rests, masses)


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
        )

    def masses(self) -> Nats:
        """[rows], nats: everything that is open in each row; a row that begins at its boundary is
        completely open, tail included."""
        begins_here = np.array([not begun for begun in self.begun], dtype=np.bool_)
        return np.where(begins_here, 0.0, _logsumexp_rows(self.nats, self.counted))

    def range_masses(self, texts: list[str], boundaries: Integers) -> Nats:
        """[texts], nats: the tokens of all rows of a boundary that continue with each text."""
        bounds = list(pairwise([*self.first.tolist(), len(self.boundaries)]))
        numbers, rows, ranges = list[int](), list[int](), list[tuple[int, int]]()
        for number, (text, boundary) in enumerate(zip(texts, boundaries.tolist(), strict=True)):
            for row in range(*bounds[boundary]):
                tokens = self.vocabulary.range_of(self.begun[row] + text)
                if tokens.start < tokens.stop:
                    numbers.append(number)
                    rows.append(row)
                    ranges.append((tokens.start, tokens.stop))
        lowest, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        at = np.array(rows, dtype=np.int64)
        inside = (self.ranks[at] >= lowest[:, None]) & (self.ranks[at] < stops[:, None])
        terms = _logsumexp_rows(self.nats[at], inside) + self.paths[at]
        return _logsumexp(terms, np.array(numbers, dtype=np.int64), len(texts))


def _name_cells(
    boundaries: Boundaries, rows: _TeacherRows, masses: Nats, cuts: Cuts
) -> tuple[list[str], Integers]:
    """The cells' texts, with the number of the boundary of each."""
    shares = rows.nats + (rows.paths - masses[rows.boundaries])[:, None]
    at, columns = np.nonzero(rows.reaching & (shares >= np.log(NAMING_SHARE)))
    candidates: list[set[str]] = [set() for _ in range(len(boundaries))]
    strings = rows.vocabulary.strings
    numbers = rows.boundaries[at].tolist()
    for row, token, number in zip(
        at.tolist(), rows.ids[at, columns].tolist(), numbers, strict=True
    ):
        candidates[number].add(strings[token][len(rows.begun[row]) :])
    begun = _begun_by_student(boundaries.student_rows)
    # A token of the student that covers a candidate decides it, unless the student just spelled the
    # candidate's beginning with a shorter token: the tokenizer then shows how far one token goes.
    student = boundaries.student.vocabulary
    uncertain = [
        {
            text
            for text in texts
            if text.startswith(realised) or not student.covers(begun[number] + text)
        }
        for number, (texts, realised) in enumerate(
            zip(candidates, boundaries.student_realised, strict=True)
        )
    ]
    cuts.prepare((begun[number], text) for number, texts in enumerate(uncertain) for text in texts)
    cell_texts: list[str] = []
    cell_boundaries: list[int] = []
    for number, (texts, realised) in enumerate(zip(candidates, boundaries.realised, strict=True)):
        # The realised tokens of both sides always share a cell.
        named = {realised} | (texts - uncertain[number])
        named |= {text[: cuts.of(begun[number], text)] for text in uncertain[number]}
        cells = _prefix_free(named - {""})
        cell_texts += cells
        cell_boundaries += [number] * len(cells)
    return cell_texts, np.array(cell_boundaries, dtype=np.int64)


def _begun_by_student(rows: OpenRows) -> list[str]:
    return [rows.begun[index] for index in rows.last.tolist()]


def _prefix_free(texts: set[str]) -> list[str]:
    """The texts that begin with no other one."""
    minimal: list[str] = []
    for text in sorted(texts):  # a prefix sorts before any text that begins with it
        if not minimal or not text.startswith(minimal[-1]):
            minimal.append(text)
    return minimal


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
