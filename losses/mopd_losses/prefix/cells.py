"""The teacher's cells at every boundary of a completion, and their masses.

A cell is text that may follow a boundary. The cells of one boundary are disjoint events of text for
any tokenizers (``names``); everything else is one event, the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.bounding_tokens import BoundingTokens, Searched
from mopd_losses.prefix.cell_ranges import CellRanges, cell_ranges
from mopd_losses.prefix.naming.decisions import Candidates
from mopd_losses.prefix.naming.names import CellNames, Flags, name_cells
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.probes import probed
from mopd_losses.prefix.text.boundaries import Boundaries, TokenizedText
from mopd_losses.prefix.text.contexts import Contexts
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, indices_in_runs
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_protocol.topk_logprobs import TopKLogprobs

Nats = NDArray[np.float64]

#: Least share of the teacher's mass at a boundary with which a candidate names a cell.
NAMING_SHARE = 1e-3

#: Least share of the teacher's mass at a boundary with which a cell's bounding tokens are searched.
BOUNDED_SHARE = 2e-2

#: Nats in place of -inf, for a sampled token that the teacher excludes: sums stay finite.
_EXCLUDED = -1e4


@dataclass(frozen=True, eq=False)
class Cells:
    """A teacher's distribution on (cells, rest) at each boundary."""

    names: CellNames
    likely: NDArray[np.bool_]  # [cells], whether bounding tokens are worth finding
    nats: Nats  # [cells], of the teacher's mass at the boundary
    rests: Nats  # [boundaries], of the same
    masses: Nats  # [boundaries], nats: of the text since the first open row
    texts: Nats  # [boundaries], nats: of the text since the first boundary's first open row
    bounding: Nats  # [boundaries], of the teacher's mass: the most that is missing of cells
    missing: NDArray[np.bool_]  # [cells], whether the teacher reaches the cell by a bounding token
    unnamed: Nats  # [candidates in no cell], of the teacher's mass at the boundary


@dataclass(frozen=True, eq=False)
class TopK:
    """The top-k of several completions, one after another, with one more entry for a sampled token
    that is outside of it."""

    ids: Integers  # [rows, k + 1]
    nats: Nats  # [rows, k + 1]
    sampled: Nats  # [rows]
    tails: Nats  # [rows], of what is not in the top-k

    @classmethod
    def of(cls, text: TokenizedText, parts: Sequence[TopKLogprobs]) -> "TopK":
        """Join the top-k of completions.

        Args:
            text: of all of them.
        """
        rows, width = len(text.ids), max([part.k for part in parts], default=0) + 1
        ids = np.full((rows, width), -1, dtype=np.int64)
        nats = np.full((rows, width), -np.inf)
        sampled, tails = np.zeros(rows), np.zeros(rows)
        for first, last, part in zip(text.first_rows, text.first_rows[1:], parts, strict=False):
            ids[first:last, : part.k] = part.ids
            nats[first:last, : part.k] = part.logprobs
            sampled[first:last] = part.token_logprobs
            tails[first:last] = part.tail_logprobs
        outside = ~(ids == text.ids[:, None]).any(axis=1)
        ids[outside, -1] = text.ids[outside]
        nats[outside, -1] = sampled[outside]
        return cls(ids, nats, sampled, tails)


def teacher_cells(
    boundaries: Boundaries,
    topk: TopK,
    pair: TokenizerPair,
    student_contexts: Contexts,
    *,
    bounds: bool,
) -> Cells:
    """Build the cells that a teacher's top-k names, and the cell of the sampled text.

    Args:
        bounds: whether the teacher's bounding tokens are searched.
    """
    rows = _TeacherRows.of(boundaries, topk)
    contexts = Contexts.of(boundaries.teacher)
    masses = _logsumexp(rows.paths + rows.masses(), rows.boundaries, len(boundaries))
    masses = np.maximum(masses, _EXCLUDED)

    def whole(numbers: Integers) -> Flags:
        lengths = boundaries.sampled[numbers]
        is_one_token = pair.student_canonical.are_one_token(student_contexts, numbers, lengths)
        chosen = np.flatnonzero(is_one_token)
        is_one_token[chosen] = pair.teacher_canonical.are_one_token(
            contexts, numbers[chosen], lengths[chosen]
        )
        return is_one_token

    candidates, shares, own_entries = rows.candidates(masses)
    names = name_cells(candidates, boundaries, pair.decisions, pair.separate, pair.marks, whole)
    entries, members = rows.members(rows.ranges(names, boundaries, pair))
    nats = rows.cell_masses(entries, members, len(names.texts))
    likely = nats - masses[names.boundaries] >= np.log(BOUNDED_SHARE)
    bounding = BoundingTokens.none(len(names.texts))
    if bounds:
        # A token that ends at the boundary may be followed by a cell: its mass is unknown.
        possible = np.logaddexp(nats, rows.ending_masses()[names.boundaries])
        possible = possible - masses[names.boundaries] >= np.log(BOUNDED_SHARE)
        searched = Searched.of(names.texts, names.boundaries, possible, names.unnamed)
        probes = probed(contexts, *rows.shorter_tokens(boundaries.teacher.text))
        bounding = pair.teacher_tokenizations.of(contexts, searched, names.marks, probes)
    # A token that begins a cell, and is a bounding token of a longer one, may belong to either.
    is_shared = np.isin(entries, rows.counted_entries(bounding))
    is_sharing = np.zeros(len(names.texts), dtype=np.bool_)
    is_sharing[members[is_shared]] = True
    is_missing = bounding.cells | is_sharing
    own = np.flatnonzero(is_sharing[members] & ~is_shared)
    known = rows.cell_masses(entries[own], members[own], len(names.texts))
    nats = np.where(is_sharing, known, nats) - masses[names.boundaries]
    missing, counted = rows.bounding_masses(bounding)
    with np.errstate(divide="ignore"):
        reduction = np.log1p(-np.minimum(np.exp(counted - masses), 1.0))
    reduction = np.maximum(reduction, _EXCLUDED)
    nats -= reduction[names.boundaries]
    masses += reduction
    named = np.bincount(names.boundaries, weights=np.exp(nats), minlength=len(boundaries))
    with np.errstate(divide="ignore"):
        rests = np.log(np.clip(1.0 - named, 0.0, None))
    texts = rows.starts + masses
    # One that begins with a cell is in it.
    shares = np.where(np.isin(own_entries, entries), -np.inf, shares)
    unnamed = shares[names.unnamed_at] - reduction[names.unnamed.boundaries]
    return Cells(names, likely, nats, rests, masses, texts, missing - masses, is_missing, unnamed)


@dataclass(frozen=True, eq=False)
class _TeacherRows:
    """The open rows of a teacher about which its top-k has information."""

    vocabulary: SortedVocabulary
    boundaries: Integers  # [rows]
    first: Integers  # [boundaries], index of the first row
    kept: Integers  # [rows], indices of the teacher's open rows
    rows: Integers  # [rows], of the teacher
    begun: Integers  # [rows], characters
    ids: Integers  # [rows, k + 1], the top-k, and the sampled token if it is outside
    ranks: Integers  # [rows, k + 1], -1 if missing
    nats: Nats  # [rows, k + 1]
    counted: NDArray[np.bool_]  # [rows, k + 1], what is mass of the row at its boundary
    reaching: NDArray[np.bool_]  # [rows, k + 1], what reaches beyond the boundary
    paths: Nats  # [rows], the sampled tokens from the boundary's first row up to this one
    topk_ids: Integers  # [all rows, k + 1]
    topk_nats: Nats  # [all rows, k + 1]
    tails: Nats  # [all rows], of what is not in the top-k
    lowest: Nats  # [all rows], of the top-k: no other token has more
    starts: Nats  # [boundaries], the sampled tokens up to the boundary's first row
    sums: Nats  # [all rows + 1], the sampled tokens up to each row

    @classmethod
    def of(cls, boundaries: Boundaries, topk: TopK) -> "_TeacherRows":
        rows, vocabulary = boundaries.teacher.open_rows, boundaries.teacher.text.vocabulary
        ids, nats = topk.ids, topk.nats
        known = (ids >= 0) & (ids < len(vocabulary.ranks))
        ranks = np.where(known, vocabulary.ranks[np.where(known, ids, 0)], -1)
        counted, reaching = (
            (ranks[rows.rows] >= lowest[:, None]) & (ranks[rows.rows] < rows.stops[:, None])
            for lowest in (rows.starts, rows.longer)
        )
        kept = np.flatnonzero(rows.are_last() | reaching.any(axis=1))
        numbers, kept_rows = rows.boundaries[kept], rows.rows[kept]
        first = np.searchsorted(numbers, np.arange(len(boundaries)))
        sampled = np.maximum(topk.sampled, _EXCLUDED)
        sums = np.concatenate([[0.0], np.cumsum(sampled)])
        listed = np.where(np.isneginf(nats), np.inf, nats)[:, :-1]
        return cls(
            vocabulary=vocabulary,
            boundaries=numbers,
            first=first,
            kept=kept,
            rows=kept_rows,
            begun=rows.begun[kept],
            ids=ids[kept_rows],
            ranks=ranks[kept_rows],
            nats=nats[kept_rows],
            counted=counted[kept],
            reaching=reaching[kept],
            paths=sums[kept_rows] - sums[kept_rows[first]][numbers],
            topk_ids=ids,
            topk_nats=nats,
            tails=topk.tails,
            lowest=listed.min(axis=1, initial=np.inf),
            starts=sums[kept_rows[first]],
            sums=sums,
        )

    def masses(self) -> Nats:
        """[rows], nats: everything that is open in each row; a row that begins at its boundary is
        completely open, tail included."""
        return np.where(self.begun == 0, 0.0, _logsumexp_rows(self.nats, self.counted))

    def ending_masses(self) -> Nats:
        """[boundaries], nats: tokens that end at the boundary, without sampled ones."""
        nats = _logsumexp_rows(self.nats, self.counted & ~self.reaching)
        return _logsumexp(self.paths + nats, self.boundaries, len(self.first))

    def shorter_tokens(self, text: TokenizedText) -> tuple[Integers, Integers, Flags]:
        """Rows, likely tokens of the top-k with which the sampled one begins, and whether to find
        bounding tokens after them."""
        sampled = np.diff(self.sums)
        likely = self.topk_nats >= np.minimum(sampled, 0.0)[:, None] + np.log(NAMING_SHARE)
        strings = self.vocabulary.lengths
        likely &= (self.topk_ids >= 0) & (self.topk_ids < len(strings))
        at = np.flatnonzero(likely)
        rows, ids = at // likely.shape[1], self.topk_ids.take(at)
        other = np.flatnonzero((strings.take(ids) > 0) & (ids != text.ids.take(rows)))
        rows, ids = rows[other], ids[other]
        first = self.vocabulary.codes_at(ids, np.zeros_like(ids))
        same = np.flatnonzero(text.codes.take(text.starts.take(rows)) == first)
        rows, ids = rows[same], ids[same]
        hashes = self.vocabulary.slices(ids, np.zeros_like(ids), strings[ids])
        begins = text.begins_with(text.starts[rows], hashes, strings[ids])
        least = np.minimum(sampled, 0.0) + np.log(BOUNDED_SHARE)
        searched = self.topk_nats.take(at[other][same]) >= least.take(rows)
        return rows[begins], ids[begins], searched[begins]

    def bounding_masses(self, bounding: BoundingTokens) -> tuple[Nats, Nats]:
        """[boundaries] each, nats: all bounding tokens, and those that ``masses`` counts."""
        matches = self.topk_ids[bounding.rows] == bounding.ids[:, None]
        present = matches.any(axis=1)
        known = _logsumexp_rows(self.topk_nats[bounding.rows], matches)
        nats = np.where(present, known, np.minimum(self.tails, self.lowest)[bounding.rows])
        nats += self.sums[bounding.rows] - self.starts[bounding.boundaries]
        counted = np.where(bounding.counted & present, nats, -np.inf)
        count = len(self.first)
        numbers = bounding.boundaries
        return _logsumexp(nats, numbers, count), _logsumexp(counted, numbers, count)

    def candidates(self, masses: Nats) -> tuple[Candidates, Nats, Integers]:
        """Return the strings beyond each boundary of the top-k's likely tokens, and whether to find
        their bounding tokens; their shares of the mass, nats; and their entries.

        Args:
            masses: [boundaries], nats, of what is open.
        """
        shares = self.nats + (self.paths - masses[self.boundaries])[:, None]
        at = np.flatnonzero(self.reaching & (shares >= np.log(NAMING_SHARE)))
        rows = at // shares.shape[1]
        likely = shares.take(at) >= np.log(BOUNDED_SHARE)
        candidates = Candidates(self.ids.take(at), self.begun[rows], self.boundaries[rows], likely)
        return candidates, shares.take(at), at

    def ranges(self, names: CellNames, boundaries: Boundaries, pair: TokenizerPair) -> CellRanges:
        """Find the tokens of each cell in these rows."""
        known = names.teacher_nodes, self.begun == 0
        return cell_ranges(
            names, pair.teacher_ranges, boundaries.teacher, self.kept, pair.marks, known
        )

    def members(self, ranges: CellRanges) -> tuple[Integers, Integers]:
        """Return the entries of these rows that continue with a cell, ascending, and the cells."""
        size, width = self.ranks.shape
        # Ranks of each row in order, with their columns; a missing one is before all others.
        shift = width.bit_length()
        ordered = np.sort((self.ranks + 1 << shift) + np.arange(width))
        origins = np.arange(size) * (len(self.vocabulary) + 1)
        entries = ((ordered >> shift) + origins[:, None]).ravel()
        edges = origins.take(ranges.rows) + 1 + [ranges.starts, ranges.stops]
        first, last = np.searchsorted(entries, edges)
        owners, inside = indices_in_runs(first, last)
        columns = ordered.ravel().take(inside) & ((1 << shift) - 1)
        at = inside // width * width + columns
        order = np.argsort(at, kind="stable")  # rows are in order
        return at.take(order), ranges.cells.take(owners.take(order))

    def cell_masses(self, entries: Integers, members: Integers, cells: int) -> Nats:
        """[cells], nats: the tokens of all rows of a boundary that continue with each cell.

        Args:
            members: [entries], cells.
        """
        nats = self.nats.take(entries) + self.paths.take(entries // self.nats.shape[1])
        return _logsumexp(nats, members, cells)

    def counted_entries(self, bounding: BoundingTokens) -> Integers:
        """Return the entries that are bounding tokens and mass of what is open."""
        rows, ids = bounding.counted_in(self.boundaries, self.rows)
        at, columns = np.nonzero(self.ids[rows] == ids[:, None])
        return rows[at] * self.ids.shape[1] + columns


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
