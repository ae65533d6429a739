"""``CellNames``: the strings that name the cells of each boundary."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mopd_losses.prefix.boundaries import Boundaries, Integers, OpenRows
from mopd_losses.prefix.cuts import Cuts
from mopd_losses.prefix.separate_tokens import LONGEST, Place, SeparateTokens
from mopd_losses.prefix.sorted_vocabulary import Marks, SortedVocabulary


@dataclass(frozen=True, eq=False)
class CellNames:
    """Strings at each boundary. A cell is the text that begins with its string, but for what its
    marks except; no text is in two cells."""

    texts: list[str]  # [cells]
    boundaries: Integers  # [cells], ascending
    marks: list[Marks]  # [cells]
    unnamed: list[set[str]]  # [boundaries], likely candidates that no student token decides

    def ranges(
        self, vocabulary: SortedVocabulary, begun: Sequence[str], firsts: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Find the tokens of each cell in each open row: cell, row, and [start, stop) ranks.

        Args:
            begun: [rows], of a side, in the order of boundaries.
            firsts: [boundaries], each boundary's first row.
        """
        readings: list[tuple[int, int, int, int]] = []
        cells = np.searchsorted(self.boundaries, np.arange(len(firsts) + 1)).tolist()
        for (cell, last_cell), rows in zip(
            pairwise(cells), pairwise([*firsts.tolist(), len(begun)]), strict=True
        ):
            numbered = [*enumerate(self.texts[cell:last_cell], start=cell)]
            for row in range(*rows):
                following = vocabulary.following(begun[row])
                for number, text in numbered:
                    if text[0] not in following:
                        continue
                    if self.marks[number]:
                        ranges = vocabulary.ranges_of(begun[row], text, self.marks[number])
                        readings += [(number, row, *tokens) for tokens in ranges]
                    else:
                        start, _, stop = vocabulary.range_of(begun[row] + text)
                        if start < stop:
                            readings.append((number, row, start, stop))
        columns = np.array(readings, dtype=np.int64).reshape(-1, 4)
        return columns[:, 0], columns[:, 1], columns[:, 2:]


def name_cells(
    candidates: list[dict[str, bool]],
    boundaries: Boundaries,
    cuts: Cuts,
    separate: SeparateTokens,
    whole: Callable[[Mapping[int, str]], set[int]],
) -> CellNames:
    """Name the cells of every boundary: the realised text, and the candidates as far as one token
    of the student decides them.

    Args:
        candidates: [boundaries], what the teacher considers next, and whether it is likely.
        whole: boundary -> its realised text, to the boundaries where each side's tokenizer spells
            it with one token, on its own and with what follows.
    """
    student, rows = boundaries.student.vocabulary, boundaries.student_rows
    begun = [rows.begun[index] for index in rows.last.tolist()]
    # A token of the student that covers a candidate decides it, unless the student just spelled the
    # candidate's beginning with a shorter token: the tokenizer then shows how far one token goes.
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
    named: list[list[str]] = []
    likely: list[set[str]] = []
    unnamed: list[set[str]] = []
    for number, (texts, realised) in enumerate(zip(candidates, boundaries.realised, strict=True)):
        lengths = {text: cuts.of(begun[number], text) for text in uncertain[number]}
        unnamed.append({text for text, length in lengths.items() if not length and texts[text]})
        names = {text: likely for text, likely in texts.items() if text not in lengths}
        for text, length in lengths.items():
            if length:
                names[text[:length]] = texts[text] or names.get(text[:length], False)
        likely.append({name for name, is_likely in names.items() if is_likely})
        # The realised tokens of both sides always share a cell.
        named.append(sorted({realised, *names}))
    marks = _all_marks(named, likely, boundaries, separate, whole)
    cells = [_cells(*each) for each in zip(named, marks, strict=True)]
    return CellNames(
        texts=[text for texts in cells for text in texts],
        boundaries=np.repeat(np.arange(len(cells)), [len(texts) for texts in cells]),
        marks=[marks[number].get(text, ()) for number, texts in enumerate(cells) for text in texts],
        unnamed=unnamed,
    )


def is_text(string: str) -> bool:
    """Return whether a string does not end with a control token."""
    return ord(string[-1]) <= 0xFF


def _cells(names: Iterable[str], marks: dict[str, Marks]) -> list[str]:
    """Select the names, in order, that belong to no shorter cell, and leave to each what belongs
    to no longer one."""
    cells: list[str] = []
    shorter: list[str] = []  # cells that the next name may begin with, each with the one before
    for name in names:  # a prefix sorts before any text that begins with it
        while shorter and not name.startswith(shorter[-1]):
            shorter.pop()
        if shorter:
            if any(_belongs(name, marks.get(cell, ())) for cell in shorter):
                continue
            _leave(name, shorter, marks)
        cells.append(name)
        shorter.append(name)
    return cells


def _leave(name: str, shorter: Iterable[str], marks: dict[str, Marks]) -> None:
    """Remove from shorter cells what belongs to a longer one, too."""
    own = marks.get(name, ())
    for cell in shorter:
        both = {text for text, belongs in marks[cell] if belongs and text.startswith(name)}
        both = {text for text in both if _belongs(text, own)}
        if both:
            marks[cell] = tuple((t, belongs and t not in both) for t, belongs in marks[cell])


def _belongs(string: str, marks: Marks) -> bool:
    """Return whether a string that begins with a cell's text belongs to the cell."""
    for text, belongs in reversed(marks):  # a longer text sorts behind its beginnings
        if string.startswith(text):
            return belongs
    return True


def _all_marks(
    named: list[list[str]],
    likely: list[set[str]],
    boundaries: Boundaries,
    separate: SeparateTokens,
    whole: Callable[[Mapping[int, str]], set[int]],
) -> list[dict[str, Marks]]:
    """[boundaries], name -> its marks, if it has any."""
    student, teacher = boundaries.student.vocabulary, boundaries.teacher.vocabulary
    places = [
        {
            name: Place(
                _begun(student, boundaries.student_rows, number, name),
                _begun(teacher, boundaries.teacher_rows, number, name),
            )
            for name in names
        }
        for number, names in enumerate(likely)
    ]
    separate.prepare((place, name) for names in places for name, place in names.items())
    realised, ahead = boundaries.realised, _texts_ahead(boundaries)
    nested = {
        number: text
        for number, text in enumerate(realised)
        if any(text.startswith(name) for name in named[number] if name != text)
    }
    whole_realised = whole(nested)
    results: list[dict[str, Marks]] = []
    for number, names in enumerate(places):
        marks = {name: separate.of(place, name) for name, place in names.items()}
        marks = {name: _as_realised(each, ahead[number]) for name, each in marks.items() if each}
        if number in whole_realised:
            longer = realised[number]
            for name in named[number]:
                if longer.startswith(name) and name != longer:
                    others = (mark for mark in marks.get(name, ()) if mark[0] != longer)
                    marks[name] = tuple(sorted([*others, (longer, False)]))
        results.append(marks)
    return results


def _as_realised(marks: Marks, ahead: str) -> Marks:
    """Correct marks by what follows, which shows better than any trial what belongs to a cell."""
    if not any(ahead.startswith(text) for text, belongs in marks if not belongs):
        return marks
    return tuple((text, belongs or ahead.startswith(text)) for text, belongs in marks)


def _begun(vocabulary: SortedVocabulary, rows: OpenRows, number: int, name: str) -> str:
    """Return the most that a side has begun before a boundary, of what a token continues with a
    name."""
    begun = rows.begun[rows.first[number] : rows.last[number] + 1]
    return next((text for text in begun if vocabulary.covers(text + name)), begun[-1])


def _texts_ahead(boundaries: Boundaries) -> list[str]:
    """[boundaries], what follows in the student's text."""
    text, rows = boundaries.student, boundaries.student_rows
    begun = [len(rows.begun[index]) for index in rows.last.tolist()]
    starts = (text.starts[rows.rows[rows.last]] + np.array(begun, dtype=np.int64)).tolist()
    return [text.symbols[start : start + LONGEST] for start in starts]
