"""``CellRanges``: the tokens of a vocabulary that continue with the cells of each boundary."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.naming.names import CellNames
from mopd_losses.prefix.text.boundaries import Places
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Integers,
    indices_in_runs,
    joined,
    keys_of,
)
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedRanges
from mopd_losses.prefix.vocabulary.marks import UNMARKED, MarksTable


@dataclass(frozen=True, eq=False)
class CellRanges:
    """The tokens of cells in open rows, in the order of boundaries, rows and cells."""

    cells: Integers  # [ranges]
    rows: Integers  # [ranges], indices of open rows
    starts: Integers  # [ranges], ranks
    stops: Integers  # [ranges]

    def without(self, rows: Integers, ranks: Integers) -> tuple["CellRanges", Integers]:
        """Remove tokens, and return the cells that had them, too.

        Args:
            rows: [tokens], indices of open rows.
            ranks: [tokens].
        """
        if not len(self.rows):
            return self, self.cells[:0]
        size = int(self.stops.max()) + int(ranks.max(initial=0)) + 1
        keys = self.rows * size + self.starts
        order = np.argsort(keys, kind="stable")
        # Cells of one row are disjoint: a token is in the last range that begins before it.
        last = np.searchsorted(keys[order], rows * size + ranks, side="right") - 1
        last = order[np.maximum(last, 0)]
        inside = (self.rows[last] == rows) & (self.starts[last] <= ranks)
        inside &= ranks < self.stops[last]
        if not inside.any():
            return self, self.cells[:0]
        last, ranks = last[inside], ranks[inside]
        divided = np.unique(last)
        owners = np.concatenate([divided, last])
        starts = np.concatenate([self.starts[divided], ranks + 1])
        order = np.lexsort((starts, owners))
        owners, starts = owners[order], starts[order]
        stops = self.stops[owners]
        followed = np.flatnonzero(owners[1:] == owners[:-1])
        stops[followed] = starts[followed + 1] - 1
        kept = np.flatnonzero(starts < stops)
        whole = np.delete(np.arange(len(self.rows)), divided)
        owners = np.concatenate([whole, owners[kept]])
        order = np.argsort(owners, kind="stable")  # a merge of two sequences that are in order
        owners = owners[order]
        starts = np.concatenate([self.starts[whole], starts[kept]])[order]
        stops = np.concatenate([self.stops[whole], stops[kept]])[order]
        return CellRanges(self.cells[owners], self.rows[owners], starts, stops), self.cells[last]


def cell_ranges(
    names: CellNames,
    marked: MarkedRanges,
    places: Places,
    chosen: Integers,
    marks: MarksTable,
    known: tuple[Integers, NDArray[np.bool_]],
) -> CellRanges:
    """Find the tokens of each cell in open rows of a side.

    Args:
        chosen: [rows], indices of open rows, ascending.
        known: [cells], the side's nodes after what some rows have begun; [rows], which ones.
    """
    open_rows = places.open_rows
    boundaries, lengths = open_rows.boundaries[chosen], open_rows.begun[chosen]
    vocabulary = marked.vocabulary
    first = np.searchsorted(names.boundaries, [boundaries, boundaries + 1])
    rows, cells = indices_in_runs(*first)
    nodes = np.full(len(cells), -1, dtype=np.int64)
    known_nodes, is_known = known
    at = np.flatnonzero(is_known[rows])
    nodes[at] = known_nodes[cells[at]]
    # Few tokens continue with a character that no token has after the one before the boundary.
    before = places.text.codes[places.offsets[boundaries] - 1]
    characters = names.texts.codes_at(np.zeros_like(names.boundaries))
    searched = np.flatnonzero(~is_known[rows])
    at, cell = rows[searched], cells[searched]
    possible = vocabulary.contain(before[at], characters[cell]) | (lengths[at] == 0)
    searched, at, cell = searched[possible], at[possible], cell[possible]
    begun = open_rows.hashes[chosen]
    nodes[searched] = vocabulary.nodes_of(joined(begun[at], lengths[at], names.texts.hashes[cell]))
    kept = np.flatnonzero(nodes >= 0)
    rows, cells, nodes = rows[kept], cells[kept], nodes[kept]
    starts, stops = vocabulary.node_starts[nodes], vocabulary.node_stops[nodes]
    has_marks = np.flatnonzero(names.marks[cells] != UNMARKED)
    if not len(has_marks):
        return CellRanges(cells, rows, starts, stops)

    def strings_of(index: int) -> tuple[str, str, int]:
        at = has_marks[index]
        text = names.texts.string(int(cells[at]))
        row = chosen[rows[at]]
        begun = places.context_of(int(open_rows.boundaries[row]), int(open_rows.rows[row]))
        return begun, text, int(names.marks[cells[at]])

    first, last = marked.of(
        keys_of(nodes[has_marks], lengths[rows[has_marks]], names.marks[cells[has_marks]]),
        strings_of,
        marks,
    )
    counts = np.ones(len(nodes), dtype=np.int64)
    counts[has_marks] = last - first
    at = np.repeat(np.arange(len(nodes)), counts)
    starts, stops = starts[at], stops[at]
    is_marked = np.zeros(len(nodes), dtype=np.bool_)
    is_marked[has_marks] = True
    _, sources = indices_in_runs(first, last)
    starts[is_marked[at]] = marked.starts[sources]
    stops[is_marked[at]] = marked.stops[sources]
    return CellRanges(cells[at], rows[at], starts, stops)
