"""``CellNames``: the strings that name the cells of each boundary."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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
    texts: list[str] = []
    counts: list[int] = []
    kept: list[Marks] = []
    for names, marks_of in zip(named, marks, strict=True):
        cells = _cells(names, marks_of)
        counts.append(len(cells))
        texts += cells
        kept += [marks_of[text] for text in cells]
    return CellNames(texts, np.repeat(np.arange(len(counts)), counts), kept, unnamed)


def is_text(string: str) -> bool:
    """Return whether a string does not end with a control token."""
    return ord(string[-1]) <= 0xFF


def _cells(names: Iterable[str], marks: dict[str, Marks]) -> list[str]:
    """Select the names, in order, that belong to no shorter cell, and leave to each what belongs
    to no longer one."""
    cells: list[str] = []
    for name in names:  # a prefix sorts before any text that begins with it
        shorter = [cell for cell in cells if name.startswith(cell)]
        if any(_belongs(name, marks[cell]) for cell in shorter):
            continue
        for cell in shorter:
            marks[cell] = tuple(
                (text, belongs and not (text.startswith(name) and _belongs(text, marks[name])))
                for text, belongs in marks[cell]
            )
        cells.append(name)
    return cells


def _belongs(string: str, marks: Marks) -> bool:
    """Return whether a string that begins with a cell's text belongs to the cell."""
    deciding = [belongs for text, belongs in marks if string.startswith(text)]
    return deciding[-1] if deciding else True


def _all_marks(
    named: list[list[str]],
    likely: list[set[str]],
    boundaries: Boundaries,
    separate: SeparateTokens,
    whole: Callable[[Mapping[int, str]], set[int]],
) -> list[dict[str, Marks]]:
    """[boundaries], name -> its marks."""
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
    for number, names in enumerate(named):
        longer = realised[number] if number in whole_realised else ""
        place = places[number]
        marks = {name: separate.of(place[name], name) if name in place else () for name in names}
        results.append(
            {name: _as_realised(marks[name], name, ahead[number], longer) for name in names}
        )
    return results


def _as_realised(marks: Marks, name: str, ahead: str, longer: str) -> Marks:
    """Correct marks by what follows, which shows better than any trial what belongs to a cell:
    ``ahead``, and ``longer``, a beginning of it that is known to be separate, or empty."""
    corrected = {text: belongs or ahead.startswith(text) for text, belongs in marks}
    if len(longer) > len(name) and longer.startswith(name):
        corrected[longer] = False
    return tuple(sorted(corrected.items()))


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
