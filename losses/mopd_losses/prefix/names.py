"""``CellNames``: the strings that name the cells of each boundary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mopd_losses.prefix.boundaries import Boundaries, Integers
from mopd_losses.prefix.cuts import Cuts


@dataclass(frozen=True, eq=False)
class CellNames:
    """Strings at each boundary; prefix-free, but for a realised text inside a shorter cell, which
    then excludes it."""

    texts: list[str]  # [cells]
    boundaries: Integers  # [cells], ascending
    excluded: list[str]  # [cells], a text that is in another cell; "" for none
    unnamed: list[set[str]]  # [boundaries], likely candidates that no student token decides


def name_cells(
    candidates: list[dict[str, bool]],
    boundaries: Boundaries,
    cuts: Cuts,
    whole: Callable[[Mapping[int, str]], set[int]],
) -> CellNames:
    """Name the cells of every boundary: the realised text, and the candidates as far as one token
    of the student decides them.

    Args:
        candidates: [boundaries], what the teacher considers next, and whether it is likely.
        whole: boundary -> its realised text, to the boundaries where either side's tokenizer spells
            it with one token in every continuation.
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
    cells: list[list[str]] = []
    unnamed: list[set[str]] = []
    for number, (texts, realised) in enumerate(zip(candidates, boundaries.realised, strict=True)):
        lengths = {text: cuts.of(begun[number], text) for text in uncertain[number]}
        unnamed.append({text for text, length in lengths.items() if not length and texts[text]})
        # The realised tokens of both sides always share a cell.
        named = {realised} | (texts.keys() - uncertain[number])
        named |= {text[:length] for text, length in lengths.items() if length}
        cells.append(_prefix_free(named))
    # If one token spells the realised text, a shorter token begins other texts only.
    realised = boundaries.realised
    hidden = {n: realised[n] for n, texts in enumerate(cells) if realised[n] not in texts}
    separate = whole(hidden)
    excluded: list[str] = []
    for number, texts in enumerate(cells):
        longer = realised[number] if number in separate else ""
        excluded += [longer if longer.startswith(text) else "" for text in texts]
        if longer:
            texts.append(longer)
            excluded.append("")
    return CellNames(
        texts=[text for texts in cells for text in texts],
        boundaries=np.repeat(np.arange(len(cells)), [len(texts) for texts in cells]),
        excluded=excluded,
        unnamed=unnamed,
    )


def is_text(string: str) -> bool:
    """Return whether a string does not end with a control token."""
    return ord(string[-1]) <= 0xFF


def _prefix_free(texts: set[str]) -> list[str]:
    """The texts that begin with no other one."""
    minimal: list[str] = []
    for text in sorted(texts):  # a prefix sorts before any text that begins with it
        if not minimal or not text.startswith(minimal[-1]):
            minimal.append(text)
    return minimal
