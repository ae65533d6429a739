"""``CellNames``: the strings that name the cells of each boundary."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.naming.decisions import Candidates, Decisions
from mopd_losses.prefix.naming.nested_names import Names, NestedNames
from mopd_losses.prefix.naming.separate_tokens import Place, SeparateTokens
from mopd_losses.prefix.text.boundaries import Boundaries, Places
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Hashes,
    Integers,
    indices_in_runs,
    keys_of,
)
from mopd_losses.prefix.vocabulary.marks import UNMARKED, MarksTable

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CellNames:
    """Strings at each boundary. A cell is the text that begins with its string, but for what its
    marks except; no text is in two cells."""

    texts: Strings  # [cells]
    boundaries: Integers  # [cells], ascending
    marks: Integers  # [cells], numbers
    nodes: Integers
    """[cells], the student's, of what its last open row has begun and the string."""
    teacher_nodes: Integers  # [cells], the teacher's, of the string
    unnamed: Names  # candidates that no student token decides
    unnamed_at: Integers  # indices of these candidates


def name_cells(
    candidates: Candidates,
    boundaries: Boundaries,
    decisions: Decisions,
    separate: SeparateTokens,
    marks: MarksTable,
    whole: Callable[[Integers], Flags],
) -> CellNames:
    """Name the cells of every boundary: the sampled text, and the candidates as far as one token
    of the student decides them.

    Args:
        whole: boundaries -> whether each side spells the sampled text with one token.
    """
    decided = decisions.of(candidates, boundaries)
    lengths = decisions.lengths.take(decided)
    names, nodes, teacher_nodes, names_of = _distinct(candidates, decided, boundaries, decisions)
    nested = NestedNames.of(names, nodes, boundaries, marks)
    uncorrected, numbers = _marks(nested, decisions, separate, whole)
    cells = nested.cells(uncorrected, numbers)
    is_cell = cells == np.arange(len(cells))
    full_lengths = (
        boundaries.teacher.text.vocabulary.lengths.take(candidates.ids) - candidates.starts
    )
    longer = np.flatnonzero((lengths > 0) & (lengths < full_lengths))
    texts, own = candidates.at(longer).texts(boundaries), cells[names_of[longer]]
    _add_candidates(texts, own, names, is_cell, numbers, marks)
    unnamed_at = np.flatnonzero(lengths == 0)
    unnamed = candidates.at(unnamed_at)
    return CellNames(
        texts=names.texts.at(is_cell),
        boundaries=names.boundaries[is_cell],
        marks=numbers[is_cell],
        nodes=nodes[is_cell],
        teacher_nodes=teacher_nodes[is_cell],
        unnamed=Names(unnamed.texts(boundaries), unnamed.boundaries, unnamed.likely),
        unnamed_at=unnamed_at,
    )


def _add_candidates(
    candidates: Strings,
    cells: Integers,
    names: Names,
    is_cell: Flags,
    numbers: Integers,
    marks: MarksTable,
) -> None:
    """Add candidates to the cell that contains their beginning, which is all that a token of the
    student decides, unless a longer cell contains them: ``numbers`` are changed.

    Args:
        cells: [candidates], the cells of their beginnings.
    """
    marked = np.flatnonzero(numbers[cells] != UNMARKED)

    def strings(indices: Integers) -> list[str]:
        return candidates.strings(marked[indices])

    belong = marks.belong(numbers[cells[marked]], candidates.hashes[marked], strings)
    outside = marked[~belong]
    # Few begin with the text of another cell, which may contain them.
    texts, boundaries = candidates.at(outside), names.boundaries[cells[outside]]
    first, last = np.searchsorted(names.boundaries, [boundaries, boundaries + 1])
    index, others = indices_in_runs(first, last)
    lengths = names.texts.lengths
    kept = is_cell[others] & (lengths[others] <= texts.lengths[index])
    index, others = index[kept], others[kept]
    begun = texts.at(index).beginnings(lengths[others])
    kept = begun == names.texts.hashes[others]
    index, others = index[kept], others[kept]
    is_in_other = marks.belong(
        numbers[others], texts.hashes[index], lambda indices: texts.strings(index[indices])
    )
    is_longer = lengths[others] > lengths[cells[outside[index]]]
    added = np.delete(outside, index[is_in_other & is_longer])
    # A shorter cell has only what the other one excludes.
    shorter = np.flatnonzero(is_in_other & ~is_longer)
    for changed, at, belongs in (
        (others[shorter], outside[index[shorter]], False),
        (cells[added], added, True),
    ):
        for cell, text in zip(changed.tolist(), candidates.strings(at), strict=True):
            numbers[cell] = marks.with_mark(int(numbers[cell]), text, belongs)


def _distinct(
    candidates: Candidates, decided: Integers, boundaries: Boundaries, decisions: Decisions
) -> tuple[Names, Integers, Integers, Integers]:
    """Add the sampled texts, which always have a cell, and sort the names of each boundary; also
    return their nodes, see ``CellNames``, and the name of each candidate, -1 for none.

    Args:
        decided: [candidates], numbers of decisions.
    """
    student = boundaries.student
    count = len(boundaries)
    sampled = Strings.of_text(
        boundaries.teacher.text.vocabulary, student.text, student.offsets, boundaries.sampled
    )
    lengths = decisions.lengths.take(decided)
    named = np.flatnonzero(lengths)
    decided = decided[named]
    texts = Strings(
        sampled.vocabulary,
        student.text,
        decisions.hashes.take(decided),
        lengths[named],
        candidates.ids[named],
        candidates.starts[named],
    ).followed_by(sampled)
    numbers = np.concatenate([candidates.boundaries[named], np.arange(count)])
    likely = np.concatenate([candidates.likely[named], np.zeros(count, dtype=np.bool_)])
    own = student.nodes_after(student.open_rows.last, sampled.hashes)
    nodes = np.concatenate([decisions.nodes.take(decided), own])
    others = boundaries.teacher.text.vocabulary.nodes_of(sampled.hashes)
    teacher_nodes = np.concatenate([decisions.teacher_nodes.take(decided), others])
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
    own = np.empty_like(order)
    own[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    names_of = np.full(len(lengths), -1)
    names_of[named] = own[: len(named)]
    names = Names(texts.at(first), numbers[first], is_likely)
    return names, nodes[first], teacher_nodes[first], names_of


def _marks(
    nested: NestedNames,
    decisions: Decisions,
    separate: SeparateTokens,
    whole: Callable[[Integers], Flags],
) -> tuple[Integers, Integers]:
    """[names] each, numbers of their marks: as found with the tokenizers, and as corrected by the
    sampled text."""
    names, boundaries, marks = nested.names, nested.sides, nested.marks
    student, texts = boundaries.student, names.texts
    uncorrected = np.full(len(texts), UNMARKED, dtype=np.int64)
    # Without marks, a shorter name's cell would contain the likely longer one.
    likely = np.flatnonzero(nested.begin_likely())
    at = names.boundaries[likely]
    sides = (student, boundaries.teacher)
    begun = [_begun(places, at, texts.hashes[likely]) for places in sides]
    own, other = (places.open_rows for places in sides)
    begun_last = own.begun[own.last[at]]

    def cell(index: int) -> tuple[Place, str]:
        student, teacher = (
            places.context_of(int(at[index]), int(places.open_rows.rows[rows[index]]))
            for places, rows in zip(sides, begun, strict=True)
        )
        naming = student[len(student) - int(begun_last[index]) :]
        return Place(student, teacher, naming), texts.string(likely[index])

    keys = keys_of(
        own.hashes[begun[0]],
        own.begun[begun[0]],
        other.hashes[begun[1]],
        other.begun[begun[1]],
        begun_last,
        texts.hashes[likely],
    )
    uncorrected[likely] = separate.of(keys, cell)
    numbers = uncorrected.copy()
    offsets, symbols = student.offsets[names.boundaries], student.text.symbols
    sampled = boundaries.sampled[names.boundaries]
    possible = np.flatnonzero((uncorrected != UNMARKED) | (texts.lengths < sampled))
    possible = possible[_follow(names, student, possible)]
    marked = np.flatnonzero(uncorrected != UNMARKED)
    # The sampled text shows only what belongs to its own cell, or to one with a longer text.
    least = _sampled_lengths(boundaries, decisions, names.boundaries[marked])
    marked = marked[texts.lengths[marked] >= least]
    # A normalizer may change the teacher's text: its token may reach beyond what is common.
    for places in sides:
        corrected = marked[_follow(names, places, marked)]
        at = names.boundaries[corrected]
        starts, ends = places.offsets[at], places.text.ends[places.rows[at]]
        columns = numbers[corrected].tolist(), starts.tolist(), ends.tolist()
        numbers[corrected] = [
            marks.as_sampled(number, places.text.symbols[start:end])
            for number, start, end in zip(*columns, strict=True)
        ]
    shorter = possible[texts.lengths[possible] < sampled[possible]]
    of_sampled = np.full(len(boundaries), UNMARKED, dtype=np.int64)
    longest = possible[texts.lengths[possible] == sampled[possible]]
    of_sampled[names.boundaries[longest]] = numbers[longest]
    with_shorter = np.unique(names.boundaries[shorter])
    is_one_token = np.zeros(len(boundaries), dtype=np.bool_)
    is_one_token[with_shorter] = whole(with_shorter)
    shorter = shorter[is_one_token[names.boundaries[shorter]]]
    starts, stops = offsets[shorter], offsets[shorter] + sampled[shorter]
    before, longer = numbers[shorter], of_sampled[names.boundaries[shorter]]

    def excluded(indices: Integers) -> Integers:
        columns = (before[indices], starts[indices], stops[indices], longer[indices])
        each = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([marks.without(number, symbols[a:b], own) for number, a, b, own in each])

    keys = keys_of(before, student.text.slices(starts, stops), longer)
    numbers[shorter] = marks.excluded.computed(keys, excluded)
    return uncorrected, numbers


def _sampled_lengths(boundaries: Boundaries, decisions: Decisions, at: Integers) -> Integers:
    """Return how much of the sampled text after boundaries, ascending, is certain to name its
    cell: of the teacher's sampled token what a token of the student decides, at most up to the end
    of the student's."""
    distinct, numbers = np.unique(at, return_inverse=True)
    places = boundaries.teacher
    rows = places.rows[distinct]
    begun = places.open_rows.begun[places.open_rows.last[distinct]]
    likely = np.zeros(len(distinct), dtype=np.bool_)
    decided = decisions.of(Candidates(places.text.ids[rows], begun, distinct, likely), boundaries)
    lengths = np.minimum(decisions.lengths.take(decided), boundaries.student_sampled[distinct])
    return lengths[numbers]


def _follow(names: Names, places: Places, at: Integers) -> Flags:
    """Return whether the text of one side continues with these names at their boundaries."""
    offsets = places.offsets[names.boundaries[at]]
    return places.text.begins_with(offsets, names.texts.hashes[at], names.texts.lengths[at])


def _begun(places: Places, boundaries: Integers, hashes: Hashes) -> Integers:
    """Return the first open row of which a token continues what is begun with a name; the last one
    if there is none."""
    rows = places.open_rows
    chosen = rows.last[boundaries]
    searched = np.flatnonzero(rows.first[boundaries] < chosen)
    at = rows.first[boundaries[searched]]
    while len(searched):
        continues = places.nodes_after(at, hashes[searched]) >= 0
        chosen[searched[continues]] = at[continues]
        searched, at = searched[~continues], at[~continues] + 1
        remaining = at < rows.last[boundaries[searched]]
        searched, at = searched[remaining], at[remaining]
    return chosen
