"""The preparation of prefix KL: all that depends on text, on the CPU, without the student."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.bounding_tokens import BoundingTokens, Searched
from mopd_losses.prefix.cell_ranges import CellRanges, cell_ranges
from mopd_losses.prefix.cells import Cells, TopK, teacher_cells
from mopd_losses.prefix.lookaheads.comparisons import LookaheadChain, LookaheadComparisons
from mopd_losses.prefix.naming.names import CellNames
from mopd_losses.prefix.other_tokenizations import OtherTokenizations
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.targets import NO_PATH, WHOLE_ROW, PrefixTargets, RangeReadings
from mopd_losses.prefix.text.boundaries import (
    Boundaries,
    OpenRows,
    Places,
    TokenizedText,
    boundaries_of,
)
from mopd_losses.prefix.text.contexts import Contexts
from mopd_losses.prefix.unknown_mass import other_texts
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Integers,
    indices_in_runs,
    ranks_in_runs,
)
from mopd_losses.prefix.vocabulary.marks import UNMARKED
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary


class Preparation:
    """Builds targets for one pair of tokenizers."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self.student: SortedVocabulary = pair.student
        self.lookaheads = LookaheadComparisons(pair)

    def targets(
        self,
        comparisons: Sequence[AlignedPair],
        offsets: Sequence[int],
        *,
        mass_floor: float,
        bounds: bool = True,
    ) -> PrefixTargets:
        """Build the targets of several completions.

        Args:
            offsets: the first position of each completion.
            mass_floor: boundaries that the teacher reaches with a smaller mass weigh less.
            bounds: whether to bound what each side may have over tokens that were not sampled.
        """
        chains = self.lookaheads.chains(comparisons)
        targets = self._targets(comparisons, offsets, chains, mass_floor, bounds=bounds)
        targets = self.lookaheads.added(targets, comparisons, offsets, chains, bounds=bounds)
        self._pair.save_if_grown()
        return targets

    def _targets(
        self,
        comparisons: Sequence[AlignedPair],
        offsets: Sequence[int],
        chains: Sequence[LookaheadChain],
        mass_floor: float,
        *,
        bounds: bool,
    ) -> PrefixTargets:
        pair, controls = self._pair, dict(self._pair.controls)
        pair.clear_if_full()
        student = TokenizedText.of(pair.student, [c.student for c in comparisons], controls)
        scores = [comparison.score for comparison in comparisons]
        teacher = TokenizedText.of(pair.teacher, [s.completion for s in scores], controls)
        blocks = [comparison.alignment.blocks for comparison in comparisons]
        boundaries = boundaries_of(student, teacher, blocks)
        contexts = Contexts.of(boundaries.student)
        topk = TopK.of(teacher, [score.topk for score in scores])
        cells = teacher_cells(boundaries, topk, pair, contexts, bounds=bounds)
        names, rows = cells.names, boundaries.student.open_rows
        bounding = BoundingTokens.none(len(names.texts))
        if bounds:
            searched = Searched.of(names.texts, names.boundaries, cells.likely, names.unnamed)
            bounding = pair.student_tokenizations.of(contexts, searched, names.marks)

        positions = _positions(student, offsets)
        paths = _Paths.of(rows, bounding)
        ends = _Ends.of(cells, contexts, bounding, pair.student_tokenizations)
        columns = ranks_in_runs(np.bincount(names.boundaries, minlength=len(boundaries)))
        named = self._named_ranges(names, boundaries)
        # A token that begins a cell, and is a bounding token of a longer one, may belong to either.
        counted, ids = bounding.counted_in(rows.boundaries, rows.rows)
        shares = self._sampled_shares(cells, contexts, np.flatnonzero(bounding.cells))
        shares += _expected_shares(cells, contexts, named, chains)
        missing = np.where(bounding.cells, other_texts(shares), -np.inf)
        named, sharing = named.without(counted, pair.student.ranks[ids])
        missing[sharing] = 0.0
        table = _CellTable.of(cells, ends, columns, missing)
        masses = torch.from_numpy(cells.masses).exp().clamp_max(1.0)
        return PrefixTargets(
            positions=torch.from_numpy(positions[rows.rows[rows.last]]),
            first_positions=torch.from_numpy(positions[paths.first_rows]),
            cells=table.nats,
            rests=table.rests,
            path_masses=masses,
            token_masses=torch.from_numpy(_token_masses(boundaries.student, cells.texts)),
            in_every_sample=torch.zeros(len(boundaries), dtype=torch.bool),
            weights=(masses / mass_floor).clamp_max(1.0) if mass_floor else torch.ones_like(masses),
            named=_named_readings(named, columns, ends, rows, positions, paths),
            known=_known_readings(rows, positions, paths),
            bounding=_bounding_readings(bounding, pair.student.ranks, rows, positions, paths),
            missing=table.missing,
            ends=table.ends,
            teacher_bounds=torch.from_numpy(cells.bounding),
            teacher_missing=table.teacher_missing,
            path_boundaries=torch.from_numpy(paths.boundaries),
            step_paths=torch.from_numpy(paths.steps),
            step_positions=torch.from_numpy(positions[paths.step_rows]),
            step_ids=torch.from_numpy(student.ids[paths.step_rows]),
        )

    def _sampled_shares(
        self, cells: Cells, contexts: Contexts, at: Integers
    ) -> NDArray[np.float64]:
        """[cells], of the teacher's mass of each cell: text that continues with the student's
        sampled tokens, up to the end of the one after the cell.

        It is spelled by them: the student has no bounding token to it.

        Args:
            at: the cells with a bounding token; of others, it is 0.
        """
        names, places = cells.names, contexts.places
        text, covering = places.text, places.rows
        numbers = names.boundaries[at]
        texts = names.texts.at(at)
        sampled = text.begins_with(places.offsets[numbers], texts.hashes, texts.lengths)
        at, numbers = at[sampled], numbers[sampled]
        kept = self._contain_the_token(cells, places, at)
        at, numbers = at[kept], numbers[kept]
        # The boundary after the token that follows the covering one.
        after = places.boundaries_of_rows[covering[numbers] + 2]
        completions = np.searchsorted(text.first_rows, covering, side="right")
        same = completions[numbers] == completions[after]
        kept = np.flatnonzero((after >= 0) & same)
        at, numbers, after = at[kept], numbers[kept], after[kept]
        kept = self._pair.student_canonical.are_canonical(contexts, after)
        at, numbers, after = at[kept], numbers[kept], after[kept]
        results = np.zeros(len(names.boundaries))
        results[at] = np.exp(cells.texts[after] - cells.texts[numbers] - cells.nats[at])
        return results

    def _contain_the_token(self, cells: Cells, places: Places, at: Integers) -> NDArray[np.bool_]:
        """Return whether the student's sampled tokens belong to cells with which the text
        continues: a longer token may be excluded, and what follows a shorter one is unknown."""
        names, text = cells.names, places.text
        numbers = names.boundaries[at]
        starts, stops = places.offsets[numbers], text.ends[places.rows[numbers]]
        results = stops - starts >= names.texts.lengths[at]
        longer = stops - starts > names.texts.lengths[at]
        searched = np.flatnonzero(longer & (names.marks[at] != UNMARKED))
        starts, stops = starts[searched], stops[searched]

        def strings(indices: Integers) -> list[str]:
            columns = (starts[indices].tolist(), stops[indices].tolist())
            return [text.symbols[start:stop] for start, stop in zip(*columns, strict=True)]

        hashes = text.slices(starts, stops)
        results[searched] = self._pair.marks.belong(names.marks[at[searched]], hashes, strings)
        return results

    def _named_ranges(self, names: CellNames, boundaries: Boundaries) -> CellRanges:
        """Find the student's tokens of each cell in all open rows."""
        pair, rows = self._pair, boundaries.student.open_rows
        return cell_ranges(
            names,
            pair.student_ranges,
            boundaries.student,
            np.arange(len(rows.rows)),
            pair.marks,
            known=(names.nodes, rows.are_last()),
        )


@dataclass(frozen=True, eq=False)
class _Paths:
    """Paths to each open row and each bounding token, see ``PrefixTargets``."""

    first_rows: Integers  # [boundaries], where its paths begin
    ids: Integers  # [open rows + bounding tokens], or NO_PATH
    boundaries: Integers  # [paths]
    steps: Integers  # [steps], the path
    step_rows: Integers  # [steps]

    @classmethod
    def of(cls, rows: OpenRows, bounding: BoundingTokens) -> "_Paths":
        """Number the paths in the order of boundaries."""
        first_rows = rows.rows[rows.first]
        np.minimum.at(first_rows, bounding.boundaries, bounding.rows)
        boundaries = np.concatenate([rows.boundaries, bounding.boundaries])
        order = np.argsort(boundaries, kind="stable")
        boundaries = boundaries[order]
        counts = np.concatenate([rows.rows, bounding.rows])[order] - first_rows[boundaries]
        has_path = counts > 0
        ordered = np.where(has_path, np.cumsum(has_path) - 1, NO_PATH)
        ids = np.empty_like(ordered)
        ids[order] = ordered
        numbers = np.repeat(np.arange(len(counts)), counts)
        step_rows = first_rows[boundaries][numbers] + ranks_in_runs(counts)
        return cls(first_rows, ids, boundaries[has_path], ordered[numbers], step_rows)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Cells of the student's token that ends at a boundary inside its sampled one."""

    boundaries: Integers  # [ends], ascending
    columns: Integers  # [ends], after those of the other cells
    nats: NDArray[np.float64]  # [ends], of the teacher's mass: the likely texts that end the token
    rests: NDArray[np.float64]  # [ends], of the same: without these texts

    @classmethod
    def of(
        cls, cells: Cells, contexts: Contexts, bounding: BoundingTokens, student: OtherTokenizations
    ) -> "_Ends":
        """Find the likely texts that are in no cell and end a token, but where mass of a cell is
        missing that this token may have. Where all of them do, so do unlikely ones: each is not
        worth a call of the tokenizer."""
        names, count = cells.names.unnamed, len(contexts.covering_rows)
        masses = np.exp(cells.unnamed)
        likely, unlikely = np.flatnonzero(names.likely), np.flatnonzero(~names.likely)
        own = names.boundaries[likely]
        ending = student.end_a_token(contexts, own, names.texts.at(likely))
        ending &= ~np.isin(own, bounding.boundaries[bounding.counted])
        totals = np.bincount(own[ending], weights=masses[likely[ending]], minlength=count)
        boundaries = np.flatnonzero(totals)
        others = np.bincount(own[~ending], minlength=count)
        with_unlikely = totals + np.bincount(
            names.boundaries[unlikely], weights=masses[unlikely], minlength=count
        )
        totals = np.where(others, totals, with_unlikely)[boundaries]
        columns = np.bincount(cells.names.boundaries, minlength=count)[boundaries]
        with np.errstate(divide="ignore"):
            rests = np.log(np.clip(np.exp(cells.rests[boundaries]) - totals, 0.0, None))
        return cls(boundaries, columns, np.log(totals), rests)


@dataclass(frozen=True, eq=False)
class _CellTable:
    """Cells by boundary, see ``PrefixTargets``; with -inf and False in places without a cell."""

    nats: Tensor  # [boundaries, cells], of the teacher's mass
    rests: Tensor  # [boundaries], of its mass outside all cells
    missing: Tensor  # [boundaries, cells], nats
    teacher_missing: Tensor  # [boundaries, cells], and the following
    ends: Tensor

    @classmethod
    def of(
        cls, cells: Cells, ends: _Ends, columns: Integers, missing: NDArray[np.float64]
    ) -> "_CellTable":
        """Place all cells.

        Args:
            columns: [cells], as ``missing``.
        """
        widest = np.concatenate([columns, ends.columns]).max(initial=-1)
        shape = (len(cells.rests), int(widest) + 1)
        nats = torch.full(shape, -torch.inf, dtype=torch.float64)
        missing_table = torch.full_like(nats, -torch.inf)
        flags = torch.zeros((2, *shape), dtype=torch.bool)
        table = cls(nats, torch.from_numpy(cells.rests.copy()), missing_table, *flags)
        at = torch.from_numpy(cells.names.boundaries), torch.from_numpy(columns)
        table.nats[at] = torch.from_numpy(cells.nats)
        table.missing[at] = torch.from_numpy(missing)
        table.teacher_missing[at] = torch.from_numpy(cells.missing)
        at = torch.from_numpy(ends.boundaries), torch.from_numpy(ends.columns)
        table.nats[at] = torch.from_numpy(ends.nats)
        table.ends[at] = True
        table.rests[at[0]] = torch.from_numpy(ends.rests)
        return table


def _expected_shares(
    cells: Cells, contexts: Contexts, named: CellRanges, chains: Sequence[LookaheadChain]
) -> NDArray[np.float64]:
    """[cells], of the teacher's mass of each cell: text that lookaheads end with, and that is one
    token of the student.

    Args:
        named: the student's tokens of the cells.
    """
    names, rows, text = cells.names, contexts.places.open_rows, contexts.text
    results = np.zeros(len(names.boundaries))
    tokens = [(chain.completion, chain.whole) for chain in chains if chain.whole is not None]
    if not tokens:
        return results
    own_rows = np.array([text.first_rows[pair] + token.student_row for pair, token in tokens])
    ranks = np.array([token.rank for _, token in tokens])
    nats = np.array([token.nats for _, token in tokens])
    starts = contexts.places.boundaries_of_rows[own_rows]
    range_rows = rows.rows[named.rows]
    at = np.flatnonzero(np.isin(range_rows, own_rows[starts >= 0]))
    at = at[np.argsort(range_rows[at], kind="stable")]
    first = np.searchsorted(range_rows[at], [own_rows, own_rows + (starts >= 0)])
    owners, ranges = indices_in_runs(*first)
    ranges = at[ranges]
    inside = (named.starts[ranges] <= ranks[owners]) & (ranks[owners] < named.stops[ranges])
    owners, reached = owners[inside], named.cells[ranges[inside]]
    before = cells.texts[names.boundaries[reached]] - cells.texts[starts[owners]]
    np.add.at(results, reached, np.exp(nats[owners] - before - cells.nats[reached]))
    return results


def _positions(text: TokenizedText, offsets: Sequence[int]) -> Integers:
    """[rows], where each row is: completions begin at ``offsets``."""
    shifts = np.array(offsets, dtype=np.int64) - text.first_rows[:-1]
    return np.arange(len(text.ids)) + np.repeat(shifts, np.diff(text.first_rows))


def _named_readings(
    named: CellRanges,
    columns: Integers,
    ends: _Ends,
    rows: OpenRows,
    positions: Integers,
    paths: _Paths,
) -> RangeReadings:
    """Return the tokens of all cells; a token that ends at its boundary is in its last open row.

    Args:
        columns: [cells].
    """
    last = rows.last[ends.boundaries]
    joined = [
        np.concatenate(pair)
        for pair in (
            (rows.boundaries[named.rows], ends.boundaries),
            (columns[named.cells], ends.columns),
            (positions[rows.rows[named.rows]], positions[rows.rows[last]]),
            (named.starts, rows.starts[last]),
            (named.stops, rows.longer[last]),
            (paths.ids[named.rows], paths.ids[last]),
        )
    ]
    order = np.argsort(joined[0], kind="stable")
    return _readings(*(column[order] for column in joined))


def _known_readings(rows: OpenRows, positions: Integers, paths: _Paths) -> RangeReadings:
    """Return all that is open at each boundary: everything, of a row that begins with it."""
    stops = np.where(rows.begun == 0, WHOLE_ROW, rows.stops)
    known = np.flatnonzero((stops == WHOLE_ROW) | (rows.starts < stops))
    return _readings(
        rows.boundaries[known],
        np.zeros_like(known),
        positions[rows.rows[known]],
        rows.starts[known],
        stops[known],
        paths.ids[known],
    )


def _bounding_readings(
    bounding: BoundingTokens, ranks: Integers, rows: OpenRows, positions: Integers, paths: _Paths
) -> RangeReadings:
    """Return the tokens of bounding tokens.

    Args:
        ranks: [vocabulary].
    """
    own = ranks[bounding.ids]
    return _readings(
        bounding.boundaries,
        bounding.counted.astype(np.int64),
        positions[bounding.rows],
        own,
        own + 1,
        paths.ids[len(rows.rows) :],
    )


def _readings(*columns: Integers) -> RangeReadings:
    return RangeReadings(*(torch.from_numpy(column) for column in columns))


def _token_masses(places: Places, texts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[boundaries], see ``PrefixTargets``."""
    starts = places.boundaries_of_rows[places.rows]
    is_inside = (starts >= 0) & (places.open_rows.begun[places.open_rows.last] > 0)
    return texts - np.where(is_inside, texts[starts], np.nan)
