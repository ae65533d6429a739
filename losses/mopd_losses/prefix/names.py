"""``CellNames``: the strings that name the cells of each boundary."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.boundaries import Boundaries, Places
from mopd_losses.prefix.decisions import Candidates, Decisions
from mopd_losses.prefix.separate_tokens import LONGEST, Place, SeparateTokens
from mopd_losses.prefix.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    joined,
    keys_of,
    ranks_in_runs,
)
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedRanges
from mopd_losses.prefix.vocabulary.marks import UNMARKED, MarksTable
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Names:
    """Strings at each boundary."""

    texts: Strings  # [names]
    boundaries: Integers  # [names], ascending
    likely: Flags  # [names], whether detours are worth finding


@dataclass(frozen=True, eq=False)
class CellNames:
    """Strings at each boundary. A cell is the text that begins with its string, but for what its
    marks except; no text is in two cells."""

    texts: Strings  # [cells]
    boundaries: Integers  # [cells], ascending
    marks: Integers  # [cells], numbers
    unnamed: Names  # likely candidates that no student token decides


def name_cells(
    candidates: Candidates,
    boundaries: Boundaries,
    decisions: Decisions,
    separate: SeparateTokens,
    marks: MarksTable,
    whole: Callable[[Integers], Flags],
) -> CellNames:
    """Name the cells of every boundary: the realised text, and the candidates as far as one token
    of the student decides them.

    Args:
        whole: boundaries -> whether each side spells the realised text with one token.
    """
    decided = decisions.of(candidates, boundaries)
    names, nodes = _distinct(candidates, decided, boundaries, decisions)
    numbers = _marks(names, boundaries, separate, marks, whole)
    is_cell = _select_cells(names, nodes, numbers, boundaries.student.text.vocabulary, marks)
    is_named = decisions.lengths.take(decided) > 0
    unnamed = candidates.at(np.flatnonzero(candidates.likely & ~is_named))
    return CellNames(
        texts=names.texts.at(is_cell),
        boundaries=names.boundaries[is_cell],
        marks=numbers[is_cell],
        unnamed=Names(unnamed.texts(boundaries), unnamed.boundaries, unnamed.likely),
    )


def _distinct(
    candidates: Candidates, decided: Integers, boundaries: Boundaries, decisions: Decisions
) -> tuple[Names, Integers]:
    """Add the realised texts, which always have a cell, and sort the names of each boundary; also
    return their nodes in the student's vocabulary behind what its last open row has begun.

    Args:
        decided: [candidates], numbers of decisions.
    """
    student = boundaries.student
    count = len(boundaries)
    realised = Strings.of_text(
        boundaries.teacher.text.vocabulary, student.text, student.offsets, boundaries.realised
    )
    lengths = decisions.lengths.take(decided)
    named = np.flatnonzero(lengths)
    decided = decided[named]
    texts = Strings(
        realised.vocabulary,
        student.text,
        decisions.hashes.take(decided),
        lengths[named],
        candidates.ids[named],
        candidates.starts[named],
    ).followed_by(realised)
    numbers = np.concatenate([candidates.boundaries[named], np.arange(count)])
    likely = np.concatenate([candidates.likely[named], np.zeros(count, dtype=np.bool_)])
    own = _nodes(student, student.open_rows.last, realised.hashes)
    nodes = np.concatenate([decisions.nodes.take(decided), own])
    # A token of the student begins with every name, but for unknown control tokens; they are last.
    size = len(student.text.vocabulary.node_starts)
    keys = numbers * size + np.where(nodes < 0, size - 1, nodes)
    order = np.argsort(keys, kind="stable")  # a merge of two sequences that are in order almost
    keys = keys.take(order)
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    first = order[starts]
    is_likely = np.zeros(len(first), dtype=np.bool_)
    if count:
        is_likely = np.logical_or.reduceat(likely[order], starts)
    return Names(texts.at(first), numbers[first], is_likely), nodes[first]


def _nodes(places: Places, open_rows: Integers, hashes: Hashes) -> Integers:
    """Find the nodes of strings behind what open rows have begun."""
    rows = places.open_rows
    whole = joined(rows.hashes[open_rows], rows.begun[open_rows], hashes)
    return places.text.vocabulary.nodes_of(whole)


def _marks(
    names: Names,
    boundaries: Boundaries,
    separate: SeparateTokens,
    marks: MarksTable,
    whole: Callable[[Integers], Flags],
) -> Integers:
    """[names], numbers of their marks."""
    student, texts = boundaries.student, names.texts
    numbers = np.full(len(texts), UNMARKED, dtype=np.int64)
    likely = np.flatnonzero(names.likely)
    at = names.boundaries[likely]
    sides = (student, boundaries.teacher)
    begun = [_begun(places, at, texts.hashes[likely]) for places in sides]
    own, other = (places.open_rows for places in sides)

    def cell(index: int) -> tuple[Place, str]:
        place = Place(
            *(
                places.context_of(int(at[index]), int(places.open_rows.rows[rows[index]]))
                for places, rows in zip(sides, begun, strict=True)
            )
        )
        return place, texts.string(likely[index])

    keys = keys_of(
        own.hashes[begun[0]],
        own.begun[begun[0]],
        other.hashes[begun[1]],
        other.begun[begun[1]],
        texts.hashes[likely],
    )
    numbers[likely] = separate.of(keys, cell)
    offsets, symbols = student.offsets[names.boundaries], student.text.symbols
    follows = student.text.begins_with(offsets, texts.hashes, texts.lengths)
    corrected = np.flatnonzero(follows & (numbers != UNMARKED))
    for index, offset in zip(corrected.tolist(), offsets[corrected].tolist(), strict=True):
        ahead = symbols[offset : offset + LONGEST]
        numbers[index] = marks.as_realised(int(numbers[index]), ahead)
    shorter = np.flatnonzero(follows & (texts.lengths < boundaries.realised[names.boundaries]))
    nested = np.unique(names.boundaries[shorter])
    is_one_token = np.zeros(len(boundaries), dtype=np.bool_)
    is_one_token[nested] = whole(nested)
    shorter = shorter[is_one_token[names.boundaries[shorter]]]
    stops = offsets[shorter] + boundaries.realised[names.boundaries[shorter]]
    hashes = student.text.slices(offsets[shorter], stops).tolist()
    columns = hashes, offsets[shorter].tolist(), stops.tolist()
    for index, hashed, start, stop in zip(shorter.tolist(), *columns, strict=True):
        realised = partial(symbols.__getitem__, slice(start, stop))
        numbers[index] = marks.without(int(numbers[index]), hashed, realised)
    return numbers


def _begun(places: Places, boundaries: Integers, hashes: Hashes) -> Integers:
    """Return the first open row of which a token continues what is begun with a name; the last one
    if there is none."""
    rows = places.open_rows
    chosen = rows.last[boundaries]
    sought = np.flatnonzero(rows.first[boundaries] < chosen)
    at = rows.first[boundaries[sought]]
    while len(sought):
        continues = _nodes(places, at, hashes[sought]) >= 0
        chosen[sought[continues]] = at[continues]
        sought, at = sought[~continues], at[~continues] + 1
        remaining = at < rows.last[boundaries[sought]]
        sought, at = sought[remaining], at[remaining]
    return chosen


def _select_cells(
    names: Names,
    nodes: Integers,
    numbers: Integers,
    vocabulary: SortedVocabulary,
    marks: MarksTable,
) -> Flags:
    """Select the names that belong to no shorter cell, and leave to each cell what belongs to no
    longer one: ``numbers`` are changed."""
    count = len(nodes)
    if not count:
        return np.zeros(0, dtype=np.bool_)
    size = len(vocabulary) + 1
    starts = names.boundaries * size + vocabulary.node_starts[nodes]
    stops = names.boundaries * size + np.where(nodes < 0, 0, vocabulary.node_stops[nodes])
    # A prefix sorts before any text that begins with it, and its ranks enclose theirs.
    furthest = np.maximum.accumulate(stops)
    is_nested = np.zeros(count, dtype=np.bool_)
    is_nested[1:] = (furthest[:-1] > starts[1:]) & (nodes[1:] >= 0)
    roots = np.maximum.accumulate(np.where(is_nested, 0, np.arange(count)))
    is_cell = ~is_nested
    # An unmarked cell contains all that begins with its text.
    sought = np.flatnonzero(is_nested & (numbers[roots] != UNMARKED))
    texts, contains = names.texts, marks.contains

    def compute(indices: Integers) -> Integers:
        shorter, strings = numbers[roots[sought[indices]]], texts.strings(sought[indices])
        return np.array(list(map(marks.belongs, shorter.tolist(), strings)))

    keys = keys_of(numbers[roots[sought]], texts.hashes[sought])
    outside = marks.members.computed(keys, compute) == 0
    # Nothing in the shortest cell is in another one, but for names behind a longer cell.
    furthest = np.maximum.accumulate(np.where(outside, stops[sought], 0))
    sought = sought[outside | (furthest > starts[sought])]
    shorter: list[_NestedCell] = []  # that the next name may begin with, each with the one before
    root = -1
    hashes = texts.hashes[sought].tolist()
    columns = (sought, roots[sought], starts[sought], stops[sought])
    for hashed, name, its_root, start, stop in zip(
        hashes, *(column.tolist() for column in columns), strict=True
    ):
        if its_root != root:
            root = its_root
            shorter = [_NestedCell(root, int(stops[root]), int(numbers[root]))]
        while shorter[-1].stop <= start:
            shorter.pop()
        text = partial(texts.string, name)
        for cell in shorter:
            if contains(cell.marks, hashed, text):
                break
        else:
            own = int(numbers[name])
            for cell in shorter:
                marked = marks.leaving(cell.marks, hashed, text, own)
                if marked != cell.marks:
                    cell.marks = numbers[cell.name] = marked
            is_cell[name] = True
            shorter.append(_NestedCell(name, stop, own))
    return is_cell


@dataclass(slots=True)
class _NestedCell:
    """A cell that other names begin with."""

    name: int
    stop: int
    marks: int


@dataclass(frozen=True, eq=False)
class CellRanges:
    """The tokens of cells in open rows, in the order of boundaries, rows and cells."""

    cells: Integers  # [ranges]
    rows: Integers  # [ranges], indices of open rows
    starts: Integers  # [ranges], ranks
    stops: Integers  # [ranges]


def cell_ranges(
    names: CellNames, marked: MarkedRanges, places: Places, chosen: Integers, marks: MarksTable
) -> CellRanges:
    """Find the tokens of each cell in open rows of a side.

    Args:
        chosen: [rows], indices of open rows, ascending.
    """
    open_rows = places.open_rows
    boundaries, lengths = open_rows.boundaries[chosen], open_rows.begun[chosen]
    begun = open_rows.hashes[chosen]
    vocabulary = marked.vocabulary
    first = np.searchsorted(names.boundaries, [boundaries, boundaries + 1])
    counts = first[1] - first[0]
    rows = np.repeat(np.arange(len(boundaries)), counts)
    cells = np.repeat(first[0], counts) + ranks_in_runs(counts)
    nodes = vocabulary.nodes_of(joined(begun[rows], lengths[rows], names.texts.hashes[cells]))
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
    sources = np.repeat(first, last - first) + ranks_in_runs(last - first)
    starts[is_marked[at]] = marked.starts[sources]
    stops[is_marked[at]] = marked.stops[sources]
    return CellRanges(cells[at], rows[at], starts, stops)
