"""Prefix KL by its definition: strings, dictionaries and loops, float64.

A token is its string: a Latin-1 character a byte, one private character for a control token.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from mopd_losses.divergences.truncation import TAIL_MARGIN
from mopd_losses.prefix.cells import DETOUR_SHARE, NAMING_SHARE
from mopd_losses.prefix.detours import LONGEST_END, PROBES_BEHIND_ENDS
from mopd_losses.prefix.loss import HIGHEST_RATIO
from mopd_losses.prefix.naming.cuts import CONTINUATIONS, COVERING
from mopd_losses.prefix.naming.separate_tokens import (
    BEHIND_SPACE,
    ENDS,
    FEW,
    LONGEST,
    TOKENS_PER_END,
    TRIED,
    TRIED_DIGITS,
    WORDS,
)
from mopd_losses.prefix.vocabulary.shorter_tokens import LONGEST as LONGEST_TOKEN
from mopd_losses.prefix.vocabulary.shorter_tokens import TRIED as TRIED_BEHIND_SHORTER
from mopd_losses.prefix.vocabulary.shorter_tokens import WORD
from tests.reference.divergences import floored_rest

#: Tokens before a boundary that may be divided differently, and tokens tried after a shorter one.
_WINDOW, _PROBES = 2, 4
#: The least share of the other side's that a rest is filled towards, if other entries are limited.
_LEAST_SHARE = math.exp(-27)
#: Nats; the default of ``entropy_aware_kl``.
_ENTROPY_THRESHOLD = 0.8

WHITE_SPACE = " \t\n\r\v\f\x1c\x1d\x1e\x1f"


@dataclass(frozen=True, eq=False)
class Side:
    """One model on one text."""

    tokens: Mapping[int, str]  # every id that spells anything
    realised: Sequence[int]
    rows: Sequence[Mapping[int, float]]  # id -> probability, of the ids that are known
    realised_probabilities: Sequence[float]
    encode: Callable[[str], list[str]]  # a text without control tokens -> its token strings
    tails: Sequence[float] = ()  # of the ids that are not known
    merges: Sequence[tuple[str, str]] = ()  # of a tokenizer of bytes that merges, in order
    block: int = 0  # rows that start before it were conditioned on another text

    @cached_property
    def text(self) -> str:
        return "".join(self.tokens[token] for token in self.realised)

    @cached_property
    def starts(self) -> list[int]:
        lengths = [len(self.tokens[token]) for token in self.realised]
        return list(accumulate(lengths, initial=0))[:-1]

    def end(self, row: int) -> int:
        return self.starts[row] + len(self.tokens[self.realised[row]])

    def covering(self, at: int) -> int | None:
        """The row whose token begins at a byte or covers it."""
        rows = enumerate(self.starts)
        return next((r for r, s in rows if self.block <= s <= at < self.end(r)), None)

    def known(self, row: int) -> dict[int, float]:
        """The probabilities of a row, the realised token's among them."""
        return {self.realised[row]: self.realised_probabilities[row], **self.rows[row]}


@dataclass(frozen=True)
class Boundary:
    """A boundary with both distributions on (cells, rest)."""

    at: int
    position: int  # the student's last open row
    student: dict[str, float]
    teacher: dict[str, float]
    teacher_rest: float
    teacher_mass: float  # of the text since the teacher's first open row
    teacher_text: float  # the teacher's probability of the text up to here
    token: tuple[int, float] | None  # start of the covering token, the student's mass up to here
    student_lacks: tuple[set[str], float]  # cells that may lack mass, and how much
    teacher_lacks: tuple[set[str], float]
    unsought: set[str]  # unlikely cells that the student may reach by a detour
    counted: float  # the student's mass that cells or the rest lack for certain
    sharing: set[str]  # cells of the student without a token that may belong to another one
    of_token: set[str]  # cells of which the student's realised token is a part
    most: dict[str, float] = field(default_factory=dict[str, float])
    """The share of the teacher's mass of a cell that the student may lack, if it is not all."""


#: The cell of the student's token that ends at a boundary inside its realised one.
END = "\0end"


def is_utf8(text: str) -> bool:
    """True if bytes are a text."""
    try:
        text.encode("latin-1").decode()
    except UnicodeError:
        return False
    return True


def common_blocks(first: str, second: str) -> list[tuple[int, int, int]]:
    """(start in the first, start in the second, length) of the common beginning and the common end:
    all common blocks of short texts."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    beginning = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    end = 0
    while end < shorter - beginning and first[-1 - end] == second[-1 - end]:
        end += 1
    blocks = [(0, 0, beginning), (len(first) - end, len(second) - end, end)]
    return [block for block in blocks if block[2]]


def boundaries(student: Side, teacher: Side) -> list[Boundary]:
    """All boundaries of both texts."""
    results: list[Boundary] = []
    for first, second, length in common_blocks(student.text, teacher.text):
        starts = {start - first for start in student.starts}
        starts |= {start - second for start in teacher.starts}
        sides = replace(student, block=first), replace(teacher, block=second)
        compared: dict[int, Boundary] = {}
        for at in sorted(start for start in starts if 0 <= start < length):
            boundary = compare(*sides, first + at, second + at, first + length)
            if boundary:
                compared[first + at] = boundary
        results += [limited(sides[0], each, compared) for each in compared.values()]
    return results


def limited(student: Side, boundary: Boundary, others: Mapping[int, Boundary]) -> Boundary:
    """Add what the student lacks at most of the cell with the realised text: text that does not
    continue with its token that covers the boundary and the next one, if both are its
    tokenizer's."""
    following = boundary.position + 2
    behind = others.get(student.starts[following]) if following < len(student.starts) else None
    if behind is None or not are_written(student, text_before(student, behind.at)[1], behind.at):
        return boundary
    realised = student.text[boundary.at :]
    return replace(
        boundary,
        most={
            cell: max(0.0, 1 - behind.teacher_text / boundary.teacher_text / boundary.teacher[cell])
            for cell in boundary.student_lacks[0] - boundary.sharing
            if realised.startswith(cell) and cell in boundary.of_token
        },
    )


def compare(student: Side, teacher: Side, at: int, teacher_at: int, stop: int) -> Boundary | None:
    """One boundary; None if a side's distribution there was conditioned on other text."""
    row, teacher_row = student.covering(at), teacher.covering(teacher_at)
    if row is None or teacher_row is None:
        return None
    ends = student.end(row), teacher.end(teacher_row) - teacher_at + at, stop
    realised = student.text[at : min(ends)]
    names, unnamed, unlikely, candidates = named_texts(student, teacher, at, teacher_at)
    whole = open_mass(teacher, teacher_at, top_k_only)
    sides = (student, at), (teacher, teacher_at)
    likely = [name for name, is_likely in names.items() if is_likely]
    excepted = {
        c: separate_tokens(*sides, c) if any(name.startswith(c) for name in likely) else {}
        for c in {*names, realised}
    }
    is_undivided = all(spells_whole(*side, realised) for side in sides)
    cells: list[str] = []

    def admits(cell: str, string: str) -> bool:
        """True if a string belongs to a cell, without regard to other cells."""
        if not string.startswith(cell):
            return False
        texts = excepted[cell]
        if is_undivided and realised.startswith(cell) and realised != cell:
            left = {
                text: not is_excepted or excepts(texts, text)
                for text, is_excepted in excepted[realised].items()
            }
            texts = {**texts, **left, realised: True}
        return not excepts(texts, string)

    for name in sorted(excepted):
        if not any(admits(cell, name) for cell in cells):
            cells.append(name)

    def cell_of(string: str) -> str:
        return next((c for c in reversed(cells) if admits(c, string)), "")

    # A candidate is in the cell of its beginning that a token of the student decides, or in a
    # longer one.
    owned = [
        (next(c for c in cells if c == name or admits(c, name)), text)
        for name, texts in candidates.items()
        for text in texts
    ]
    outside = [(cell, text) for cell, text in owned if len(cell_of(text)) < len(cell)]
    for cell, text in outside:
        excepted[cell][text] = False

    def mass(
        side: Side, at: int, cell: str, known: Vocabulary | None, shared: Collection[_Token] = ()
    ) -> float:
        return cell_mass(side, at, lambda string: cell_of(string) == cell, known, shared)

    def sharing(side: Side, at: int, shared: Collection[_Token]) -> set[str]:
        """Return the cells that tokens may belong to besides the longer one they lead to."""
        ends = (token[len(side.text[side.starts[row] : at]) :] for row, token in shared)
        return {cell_of(end) for end in ends} - {""}

    shares = {c: mass(teacher, teacher_at, c, top_k_only) / whole for c in cells}
    likely = [c for c in cells if shares[c] >= DETOUR_SHARE]
    probes = probed(teacher, teacher_at)
    others = {*unnamed}
    before = whole
    words = {word for word in WORDS if word in teacher.tokens.values()}
    # A token that ends at the byte may be followed by a cell: its mass is unknown.
    ended = ending_mass(teacher, teacher_at, top_k_only) / whole
    possible = [c for c in cells if shares[c] + ended >= DETOUR_SHARE]
    lacks, counted, shared = detours(
        teacher, teacher_at, possible, others, top_k_only, words, admits, probes
    )
    whole -= counted
    shares = {c: mass(teacher, teacher_at, c, top_k_only, shared) / whole for c in cells}
    lacks = lacks[0] | sharing(teacher, teacher_at, shared), lacks[1]
    student_lacks, counted, shared = detours(student, at, likely, {*unnamed}, None, words, admits)
    student_whole = open_mass(student, at, None) - counted
    certain = counted / student_whole
    student_shares = {c: mass(student, at, c, None, shared) / student_whole for c in cells}
    students_sharing = sharing(student, at, shared)
    student_lacks = student_lacks[0] | students_sharing, student_lacks[1]
    ends_all = [c for c in unnamed if ends_a_token(student, at, c)]
    ending = [unnamed[c] for c in ends_all if not cell_of(c)]
    if ending and not counted:
        # Unlikely texts end the token if all likely ones do.
        if len(ends_all) == len(unnamed):
            ending += [share for c, share in unlikely if not cell_of(c)]
        shares[END] = math.fsum(ending) * before / whole
        token = student.text[student.starts[row] : at]
        own = path(student, at, row, None) * token_mass(student, row, lambda t: t == token)
        student_shares[END] = own / student_whole
    token = student.text[at : student.end(row)]
    return Boundary(
        at=at,
        position=row,
        student=student_shares,
        teacher=shares,
        teacher_rest=1 - math.fsum(shares.values()),
        teacher_mass=min(1.0, whole),
        teacher_text=math.prod(
            teacher.realised_probabilities[: open_rows(teacher, teacher_at, top_k_only)[0]]
        )
        * whole,
        token=(
            (start, token_mass(student, row, lambda t: t.startswith(student.text[start:at])))
            if (start := student.starts[row]) < at
            else None
        ),
        student_lacks=(student_lacks[0], student_lacks[1] / student_whole),
        teacher_lacks=(lacks[0], lacks[1] / whole),
        unsought={
            c
            for c in cells
            if c not in likely and (may_cross(student, at, c) or is_several(student, at, c))
        }
        - {cell_of(string) for string in continued(student, at) if not student_lacks[1]},
        counted=certain,
        sharing=students_sharing,
        of_token={c for c in cells if admits(c, token)},
    )


Vocabulary = Callable[[Side, int], "set[int]"]


def top_k_only(side: Side, row: int) -> set[int]:
    """The ids in a truncated row."""
    return set(side.known(row))


def open_rows(side: Side, at: int, known: Vocabulary | None) -> list[int]:
    """Rows that determine what follows a byte; of a truncated side, by what its rows know."""
    results: list[int] = []
    for row, start in enumerate(side.starts):
        begun = side.text[start:at]
        ids = side.tokens.keys() if known is None else known(side, row) & side.tokens.keys()
        continues = any(
            side.tokens[i].startswith(begun) and len(side.tokens[i]) > len(begun) for i in ids
        )
        if side.block <= start <= at and (row == side.covering(at) or (start < at and continues)):
            results.append(row)
    return results


def path(side: Side, at: int, row: int, known: Vocabulary | None) -> float:
    """The probability of the realised tokens from the first open row up to this one."""
    return math.prod(side.realised_probabilities[open_rows(side, at, known)[0] : row])


def token_mass(side: Side, row: int, accepts: Callable[[str], bool]) -> float:
    known = side.known(row).items()
    return math.fsum(p for i, p in known if i in side.tokens and accepts(side.tokens[i]))


def open_mass(side: Side, at: int, known: Vocabulary | None) -> float:
    """The mass of the text since the first open row, and of anything that may follow."""
    total = 0.0
    for row in open_rows(side, at, known):
        begun = side.text[side.starts[row] : at]
        covers = row == side.covering(at)

        def counts(token: str, begun: str = begun, covers: bool = covers) -> bool:
            return token.startswith(begun) and (covers or token != begun)

        mass = 1.0 if not begun else token_mass(side, row, counts)
        total += path(side, at, row, known) * mass
    return total


def ending_mass(side: Side, at: int, known: Vocabulary | None) -> float:
    """The mass of the tokens that cover a byte and end at it, in place of the realised one."""
    row = side.covering(at)
    assert row is not None
    begun = side.text[side.starts[row] : at]
    mass = token_mass(side, row, lambda token: token == begun) if begun else 0.0
    return path(side, at, row, known) * mass


def continued(side: Side, at: int) -> set[str]:
    """Return the ends of tokens behind a byte that spell the text before it since a row's start."""
    begun = {side.text[side.starts[row] : at] for row in open_rows(side, at, None)} - {""}
    return {t[len(b) :] for b in begun for t in side.tokens.values() if t.startswith(b)} - {""}


#: A row and the string of a token.
_Token = tuple[int, str]


def cell_mass(
    side: Side,
    at: int,
    belongs: Callable[[str], bool],
    known: Vocabulary | None,
    shared: Collection[_Token],
) -> float:
    """The mass of the text since the first open row, continued with a string of a cell, without
    the tokens that it may share with another cell."""
    total = 0.0
    for row in open_rows(side, at, known):
        begun = side.text[side.starts[row] : at]

        def continues(token: str, begun: str = begun, row: int = row) -> bool:
            is_shared = (row, token) in shared
            return not is_shared and token.startswith(begun) and belongs(token[len(begun) :])

        total += path(side, at, row, known) * token_mass(side, row, continues)
    return total


def excepts(texts: dict[str, bool], string: str) -> bool:
    """True if the longest of these texts with which a string begins is no part of a cell."""
    longest = max((text for text in texts if string.startswith(text)), key=len, default="")
    return texts.get(longest, False)


def separate_tokens(
    student_at: tuple[Side, int], teacher_at: tuple[Side, int], cell: str
) -> dict[str, bool]:
    """Longer tokens of the student, behind the byte, and whether they are known to be no part of a
    cell: no text that the student's tokenizer spells with one of them begins with a token of the
    teacher that ends inside it and is in the cell, or in that of a longer token that is part of the
    cell; and no longer text that is one token of the teacher has a token of the student that ends
    behind the cell's text, or between it and the token's end."""
    student, teacher = student_at[0], teacher_at[0]
    begun, teacher_begun = (begun_before(*side, cell) for side in (student_at, teacher_at))
    begun_last = student.text[student.starts[open_rows(*student_at, None)[-1]] : student_at[1]]
    own, realised = (
        side.text[at : side.end(row)]
        for side, at in (student_at, teacher_at)
        for row in [side.covering(at)]
        if row is not None
    )
    # The realised text shows only what belongs to its own cell, or to one with a longer text.
    shows = min(len(own), len(decided(*student_at, realised))) <= len(cell)
    shown = [own, realised] if shows else []
    results: dict[str, bool] = {}
    separate: set[str] = set()
    others: dict[str, list[str]] = {}  # longer texts that are one token of the student

    def named(text: str, whole: str, end: int) -> str:
        """Return the name of the cell that the teacher's token is part of; all of the text if it
        does not end inside it."""
        inside = len(cell) < end < len(text)
        name = cut(student, begun_last, whole[:end]) if inside else end
        return text[: max(name, len(cell))] if len(cell) <= end else text

    tokens = frequent(student, begun + cell, TRIED)
    for token in sorted(tokens, key=len):
        text = token[len(begun) :]
        longer = frequent(student, token, len(student.tokens))
        if len(longer) > FEW or len(text) > LONGEST:
            continue
        names: list[str] = []
        after = continuations(student, begun + text) + continuations(teacher, teacher_begun + text)
        rest = text[len(cell) :]
        most = TRIED_DIGITS if rest.isdecimal() else TRIED_BEHIND_SHORTER
        after += [t[len(rest) :] for t in frequent(teacher, rest, most)]
        after += BEHIND_SPACE if text[-1] in WHITE_SPACE else ()
        for continued in ["", *after]:
            whole = text + continued
            end = first_end(teacher, teacher_begun, whole)
            own_end = first_end(student, begun, whole)
            if own_end == len(text) and end != -1:
                names.append(named(text, whole, end))
                if names == [cell]:
                    break  # no continuation makes it separate
            elif not continued:
                break
            elif own_end > len(text) and len(cell) <= end < len(text):
                others.setdefault(whole[:own_end], []).append(named(text, whole, end))
            elif end == len(whole) and len(cell) <= own_end < len(text):
                names.append(cell)
        names += others.get(text, []) if names else []
        if names and all(name == text or name in separate for name in names):
            separate.add(text)
            results[text] = True
            for other in longer:
                results.setdefault(other[len(begun) :], False)
    for text, names in others.items():
        if any(text.startswith(x) for x in separate) and not separate.issuperset(names):
            results.setdefault(text, False)
    for token in shown:
        texts = [text for text in results if token.startswith(text)]
        if texts:
            results[max(texts, key=len)] = False
    return results


def begun_before(side: Side, at: int, cell: str) -> str:
    """The most text before a byte that some token spells together with a cell; else the text of the
    last open row."""
    begun = [side.text[side.starts[row] : at] for row in open_rows(side, at, None)]
    spelled = (b for b in begun if any(t.startswith(b + cell) for t in side.tokens.values()))
    return next(spelled, begun[-1])


def frequent(side: Side, prefix: str, count: int) -> list[str]:
    """The tokens with the lowest ids that begin with a string and continue."""
    tokens = [t for _, t in sorted(side.tokens.items()) if t.startswith(prefix) and t != prefix]
    return tokens[:count]


def continuations(side: Side, text: str, tokens: int = TOKENS_PER_END) -> list[str]:
    """Texts that a side may merge with the end of a text, of so many tokens for each end."""
    starts = [start for start in characters(text)[-ENDS:] if start > 0]
    ends = [(text[start:], len(text) - start) for start in starts]
    return [t[n:] for end, n in ends for t in frequent(side, end, tokens)]


def first_end(side: Side, begun: str, text: str) -> int:
    """Characters of a text up to the end of the first token that reaches beyond ``begun``; -1 if no
    tokenizer takes the text."""
    if not is_utf8(begun + text):
        return -1
    ends = accumulate(map(len, side.encode(begun + text)))
    return next((end for end in ends if end > len(begun)), len(begun)) - len(begun)


def spells_whole(side: Side, at: int, text: str) -> bool:
    """True if one token, realised or the tokenizer's, spells a text and perhaps what is before."""
    context, stop = text_before(side, at)[0], at + len(text)
    covering = side.covering(at)
    assert covering is not None
    if side.end(covering) == stop:
        return True
    if not is_utf8(context + text):
        return False
    ends = list(accumulate(map(len, side.encode(context + text))))
    start = next(s for s, e in zip([0, *ends], ends, strict=False) if e >= len(context + text))
    return start <= len(context)


def text_before(side: Side, at: int) -> tuple[str, int, int]:
    """The text of a few tokens before a byte, their first row, and the covering row."""
    covering = side.covering(at)
    assert covering is not None
    first = covering + (side.starts[covering] < at)
    spelled = [r for r, i in enumerate(side.realised) if ord(side.tokens[i][-1]) < 256]
    while first > max(covering - _WINDOW, 0) and first - 1 in spelled:
        if side.starts[first - 1] < side.block:
            break
        first -= 1
    # A tokenizer spells whole characters: a context does not begin inside one.
    if not is_continuation(side.text[at]):
        while first < covering and is_continuation(side.text[side.starts[first]]):
            first += 1
    start = side.starts[first] if first < len(side.starts) else at
    return side.text[start:at], first, covering


def is_continuation(byte: str) -> bool:
    """True for a byte that continues a character of UTF-8."""
    return "\x80" <= byte < "\xc0"


def detours(
    side: Side,
    at: int,
    cells: Sequence[str],
    others: set[str],
    known: Vocabulary | None,
    words: set[str],
    admits: Callable[[str, str], bool],
    probes: Collection[tuple[int, str]] = (),
) -> tuple[tuple[set[str], float], float, set[_Token]]:
    """Cells that the tokenizer reaches over tokens that are neither realised nor mass of the cell,
    the mass of these tokens, and of those that count as open, which are returned, too; ``words``
    may follow white space, and a cell ``admits`` texts that begin with it."""
    context, first, covering = text_before(side, at)
    rows_before = [r for r in range(first, len(side.starts)) if side.starts[r] < at]
    is_canonical = are_written(side, first, at)
    lacking: set[str] = set()
    deviations = {
        (row, side.text[side.starts[row] : at]): False
        for row in rows_before
        if is_canonical and row < covering and side.end(row) < at
        if side.text[side.starts[row] : at] in side.tokens.values()
    }
    is_run = len(context) > 1 and all(c in WHITE_SPACE for c in context[-2:])
    if is_run:
        others = others | words - {*cells}
    deviating: dict[tuple[int, str], bool] = {}
    for cell in [*cells, *sorted(others)]:
        is_text = ord(cell[-1]) < 256
        crossed = may_cross(side, at, cell) if context else len(cell) > 1
        # Inside a token, what follows must divide the text before the byte anew.
        is_inside = bool(context) and side.starts[covering] < at
        crossed = crossed or is_several(side, at, cell) or is_run or is_inside
        if is_text and not crossed:
            continue
        if not is_canonical:
            continue
        detour = None
        # A text may be one token, and no longer one once more follows.
        joined = is_text and has_joining_token(side, context, cell)
        is_space = is_text and (context + cell).isascii() and cell[-1] in WHITE_SPACE
        afters = ["", *(WORDS if is_space else ())]
        afters += continuations(side, context + cell, 1) if joined else []
        if is_text and not is_utf8(context + cell):
            afters = completions(side, context + cell)
        continued: list[tuple[int, str, bool]] = []
        for after in afters:
            whole = context + cell + after if is_text else context
            if detour or not is_utf8(whole):
                continue
            is_ended = is_text and is_utf8(context + cell) and after
            limit = len(context) if is_ended else len(context + cell)
            encoded = side.encode(whole)
            other = first_deviation(
                side, context, cell + after, encoded, first, covering, limit=limit
            )
            if after:
                continued += [other] if other else []
            else:
                detour = other
        # The commonest of several, and the first of these.
        detour = detour or next((each for each, _ in Counter(continued).most_common(1)), None)
        spelled = side.encode(context + cell) if is_text and is_utf8(context + cell) else []
        is_written = not detour and cell in cells and "".join(spelled) == context + cell
        for after in dividing(side, spelled[-1]) if is_written else ():
            if not detour and admits(cell, cell + after) and is_utf8(context + cell + after):
                encoded = side.encode(context + cell + after)
                limit = len(context + cell)
                detour = first_deviation(
                    side, context, cell + after, encoded, first, covering, limit=limit
                )
        if is_text and cell not in cells:
            deviated = [
                first_deviation(
                    side,
                    context,
                    cell + after,
                    side.encode(context + cell + after),
                    first,
                    covering,
                    limit=len(context),
                )
                for after in continuations(side, context + cell, 1)
                if is_utf8(context + cell + after)
            ]
            for other in [each for each, _ in Counter(filter(None, deviated)).most_common(1)]:
                if not other[2]:
                    deviating.setdefault(other[:2], False)
        if detour and (cell in cells or not detour[2]):
            deviating[detour[:2]] = detour[2]
            lacking |= {cell} & set(cells)
    for origin, string in sorted(probes) if is_canonical else ():
        before = side.text[side.starts[origin] : at]
        if not are_written(side, origin, at):
            continue
        limit = len(before + string)
        afters = [""] if is_utf8(before + string) else completions(side, before + string)
        deviated = [
            first_deviation(side, before, string + after, encoded, origin, covering, limit=limit)
            for after in afters
            if is_utf8(before + string + after)
            for encoded in [side.encode(before + string + after)]
        ]
        detour = next((d for d, _ in Counter(filter(None, deviated)).most_common(1)), None)
        if detour and not detour[2]:
            deviating.setdefault(detour[:2], False)
    for row in open_rows(side, at, None) if is_canonical else ():
        begun = side.text[side.starts[row] : at]
        for cell in cells if row >= first else ():
            for token in shorter_tokens(side, begun, cell):
                if token != begun or row == covering:
                    lacking.add(cell)
                    deviating.setdefault((row, token), True)
    for row in rows_before if is_canonical else ():
        token = side.text[side.starts[row] : at]
        for cell in cells if token in side.tokens.values() else ():
            for shorter in shorter_tokens_before(side, token, cell):
                lacking.add(cell)
                deviating.setdefault((row, shorter), False)
    deviations |= deviating
    rows = {row: path(side, at, row, known) for row in open_rows(side, at, known)}
    origin = min(rows)
    total = counted = 0.0
    shared: set[_Token] = set()
    for (row, token), is_open in deviations.items():
        token_id = max(i for i, string in side.tokens.items() if string == token)  # behind bytes
        is_known = token_id in side.known(row)
        # No token outside a truncated row has more than one inside.
        least = min(filter(None, side.rows[row].values()), default=1.0)
        mass = side.known(row)[token_id] if is_known else min(side.tails[row], least)
        before = math.prod(side.realised_probabilities[origin:row])
        after = math.prod(side.realised_probabilities[row:origin])
        total += mass * before / after
        if is_open and is_known:
            counted += mass * before / after
            shared.add((row, token))
    return (lacking, total), counted, shared


def are_written(side: Side, first: int, at: int) -> bool:
    """True if the tokens from a row on that begin before a byte are the tokenizer's, with all of
    the last one, and with what follows if they end with white space."""
    covering = side.covering(at)
    assert covering is not None
    rows = [r for r in range(first, len(side.starts)) if side.starts[r] < at]
    text = "".join(side.tokens[side.realised[r]] for r in rows)
    for row in range(first + len(rows), len(side.realised)):
        token = side.tokens[side.realised[row]]
        is_divided = text[-1:] in [*WHITE_SPACE] or is_continuation(token[0])
        if not text or not is_divided or ord(token[-1]) > 255:
            break
        text += token
    realised = [side.tokens[side.realised[r]] for r in rows]
    return is_utf8(text) and (side.encode(text) if text else [])[: len(rows)] == realised


def characters(text: str) -> list[int]:
    """Return where the characters of UTF-8 begin in bytes."""
    return [at for at, c in enumerate(text) if at == 0 or not "\x80" <= c < "\xc0"]


def completions(side: Side, text: str) -> list[str]:
    """Return what completes the last character of a text, and perhaps follows it, in a token; also
    the first character that begins no token."""
    tail = text[characters(text)[-1] :]
    results = [token[len(tail) :] for token in frequent(side, tail, TRIED_BEHIND_SHORTER)]
    every = (
        chr(code).encode().decode("latin-1")
        for code in range(0x80, 0x110000)
        if not 0xD800 <= code < 0xE000
    )
    for character in every:
        if character.startswith(tail) and not any(
            t.startswith(character) for t in side.tokens.values()
        ):
            return [*results, character[len(tail) :]]
    return results


def is_several(side: Side, at: int, cell: str) -> bool:
    """True if what is begun before a byte and a cell begin longer tokens, but are none."""
    covering = side.covering(at)
    assert covering is not None
    whole = side.text[side.starts[covering] : at] + cell
    tokens = side.tokens.values()
    return whole not in tokens and any(token.startswith(whole) for token in tokens)


def shorter_tokens(side: Side, begun: str, cell: str) -> set[str]:
    """Tokens of what is begun and a beginning of a cell that the tokenizer writes in place of the
    token that spells all of it, by what follows."""
    whole = begun + cell
    if whole not in side.tokens.values():
        return set()
    return {token for token in first_tokens(side, whole) if len(token) >= len(begun)}


def shorter_tokens_before(side: Side, token: str, cell: str) -> set[str]:
    """Shorter tokens that the tokenizer writes in place of a token in front of a cell, by what
    follows, where one token may spell the rest of the token and the cell."""
    shorter = first_tokens(side, token) & first_tokens(side, token + cell)
    others = side.tokens.values()
    return {
        each
        for each in shorter
        if len(each) < len(token)
        and any(other.startswith((token + cell)[len(each) :]) for other in others)
    }


def first_tokens(side: Side, whole: str) -> set[str]:
    """Tokens with which the tokenizer begins a text in place of one that spells all of it, if
    nothing or a frequent token follows, or one that the tokenizer may write behind a part."""
    results: set[str] = set()
    if is_utf8(whole):
        own = side.encode(whole)[0]
        if whole.startswith(own) and len(own) < min(len(whole), LONGEST_TOKEN):
            results.add(own)
    afters = dividing(side, whole) if whole in side.tokens.values() else []
    for after in [*afters, *(WORD if whole[-1] in WHITE_SPACE else "")]:
        own = side.encode(whole + after)[0] if is_utf8(whole + after) else whole
        if whole.startswith(own) and len(own) < min(len(whole), LONGEST_TOKEN):
            results.add(own)
    for length in range(1, min(len(whole), LONGEST_TOKEN)):
        token = whole[:length]
        if token not in side.tokens.values():
            continue
        for longer in frequent(side, whole[length:], TRIED_BEHIND_SHORTER):
            if is_utf8(token + longer) and side.encode(token + longer)[0] == token:
                results.add(token)
    return results


def following(side: Side, token: str, prefix: str, count: int) -> list[str]:
    """The tokens, those that are merged first, that begin with a string, continue it, and stay as
    they are behind a token."""
    results: list[str] = []
    for whole in dict.fromkeys(left + right for left, right in side.merges):
        is_longer = len(results) < count and whole.startswith(prefix) and whole != prefix
        if is_longer and merged(side, token + whole) == [token, whole]:
            results.append(whole)
    return results


def merged(side: Side, text: str, left: int = 1) -> list[str]:
    """The tokens of a text by merges: the first pair of the earliest merge, until there is none or
    so many tokens are left."""
    tokens = [*text]
    while len(tokens) > left:
        pairs = [*pairwise(tokens)]
        known = [pair for pair in pairs if pair in side.merges]
        if not known:
            break
        at = pairs.index(min(known, key=side.merges.index))
        tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
    return tokens


def dividing(side: Side, token: str) -> list[str]:
    """Texts behind which the tokenizer may begin with less than a token: the ends of tokens that
    stay as they are behind a beginning of it, or behind the first of two parts of its end."""
    parts: dict[int, str] = {}
    end, rest = 0, token
    while len(rest) > 1 and merged(side, rest) == [rest]:
        first, rest = merged(side, rest, left=2)
        end += len(first)
        parts[end] = first
    results: list[str] = []
    for end in range(1, len(token)):
        for part in dict.fromkeys([token[:end], parts.get(end, token[:end])]):
            if part in side.tokens.values():
                results += [t[len(token) - end :] for t in following(side, part, token[end:], 1)]
    return results


def may_cross(side: Side, at: int, cell: str) -> bool:
    """True if a token may consist of the end of the text before a byte, and a cell's beginning."""
    context, _, _ = text_before(side, at)
    tails = [context[n:] for n in range(len(context))]
    crossed = any(t.startswith(x + cell[0]) for x in tails for t in side.tokens.values())
    return crossed and ord(cell[-1]) < 256


def ends_a_token(side: Side, at: int, text: str) -> bool:
    """True if a byte is inside a realised token, and a shorter token ends at the byte if it is
    followed by a text, and by any other text behind that one."""
    context, first, covering = text_before(side, at)
    begun = side.text[side.starts[covering] : at]
    is_text = ord(text[-1]) < 256
    if not begun or (is_text and may_cross(side, at, text)):
        return False
    # No token contains both the end of the context and the text, which matters to white space only.
    is_divided_by_text = is_text and context[-1].isascii() and context[-1].isspace()
    followed = context + text if is_divided_by_text else context
    realised = [side.tokens[side.realised[row]] for row in range(first, covering + 1)]
    if not is_utf8(followed) or not are_written(side, first, at):
        return False
    return side.encode(followed)[: len(realised)] == [*realised[:-1], begun]


def has_joining_token(side: Side, context: str, cell: str) -> bool:
    """True if a token spells the end of a context and all of the cell behind it."""
    if not is_utf8(context + cell):
        return False
    token = side.encode(context + cell)[-1]
    return len(token) > len(cell)


def first_deviation(
    side: Side,
    context: str,
    cell: str,
    tokens: Sequence[str],
    first: int,
    covering: int,
    *,
    limit: int,
) -> tuple[int, str, bool] | None:
    """Row, token and whether it counts as open, of the first token of a path that is neither
    realised nor mass of the cell; none beyond the context that reaches the limit."""
    whole, start = context + cell, 0
    for row, token in enumerate(tokens, start=first):
        end = start + len(token)
        if not whole.startswith(token, start):
            return None
        if end > len(context):
            return (row, token, True) if end < limit else None
        if token != side.tokens[side.realised[row]]:
            return row, token, end == len(context) and row == covering
        start = end
    return None


def spread(ordered: Sequence[str], prefix: str, most: int) -> set[str]:
    """Return the ends of some tokens, in order, that are longer than a prefix."""
    longer = [t for t in ordered if t.startswith(prefix) and t != prefix]
    step = max(-(-len(longer) // most), 1)
    return {token[len(prefix) :] for token in longer[::step]}


def probed(side: Side, at: int) -> set[tuple[int, str]]:
    """Spell a few tokens that may follow a shorter token than the realised one, with the row of the
    shorter one: the earliest, for those behind the end of the text."""
    covering = side.covering(at)
    assert covering is not None
    first = covering + (side.starts[covering] < at)
    results: set[tuple[int, str]] = set()
    behind_ends: dict[int, tuple[int, set[str]]] = {}
    ordered = sorted(side.tokens.values())
    earliest = text_before(side, at)[1]
    while first > earliest:
        first -= 1
        start = side.starts[first]
        for token_id, probability in side.known(first).items():
            token = side.tokens.get(token_id, "")
            end = start + len(token)
            likely = probability >= side.realised_probabilities[first] * NAMING_SHARE
            if not token or token_id == side.realised[first] or end >= at or not likely:
                continue
            if side.text.startswith(token, start):
                covered = side.text[end:at]
                results |= {(first, string) for string in spread(ordered, covered, _PROBES)}
                if probability < side.realised_probabilities[first] * DETOUR_SHARE:
                    continue
                results.add((first, ""))  # tokens behind the shorter one may end at the byte
                for length in range(1, min(LONGEST_END, len(covered) - 1) + 1):
                    strings = spread(ordered, covered[-length:], PROBES_BEHIND_ENDS)
                    behind_ends[length] = first, strings
    return results | {(row, s) for row, strings in behind_ends.values() for s in strings}


def named_texts(
    student: Side, teacher: Side, at: int, teacher_at: int
) -> tuple[dict[str, bool], dict[str, float], list[tuple[str, float]], dict[str, set[str]]]:
    """The teacher's candidates as far as one token of the student decides them, and whether they
    are likely; candidates of which no token decides anything, with their shares, likely and
    unlikely ones; and the candidates of each of the former."""
    whole = open_mass(teacher, teacher_at, top_k_only)
    named: dict[str, bool] = {}
    unnamed: dict[str, float] = {}
    unlikely: list[tuple[str, float]] = []
    candidates: dict[str, set[str]] = {}
    for row in open_rows(teacher, teacher_at, top_k_only):
        crossed = teacher.text[teacher.starts[row] : teacher_at]
        for token, probability in teacher.known(row).items():
            text = teacher.tokens.get(token, "")
            if not text.startswith(crossed) or len(text) == len(crossed):
                continue
            share = path(teacher, teacher_at, row, top_k_only) * probability / whole
            if share < NAMING_SHARE:
                continue
            candidate = text[len(crossed) :]
            name = decided(student, at, candidate)
            is_likely = share >= DETOUR_SHARE
            if name:
                named[name] = named.get(name, False) or is_likely
                candidates.setdefault(name, set()).add(candidate)
            elif is_likely:
                unnamed[candidate] = unnamed.get(candidate, 0.0) + share
            else:
                unlikely.append((candidate, share))
    return named, unnamed, unlikely, candidates


def decided(student: Side, at: int, candidate: str) -> str:
    """The beginning of a candidate that one token of the student decides."""
    covering = student.covering(at)
    assert covering is not None
    begun = student.text[student.starts[covering] : at]
    covered = any(t.startswith(begun + candidate) for t in student.tokens.values())
    realised = student.text[at : student.end(covering)]
    uncertain = candidate.startswith(realised) or candidate[-1] in WHITE_SPACE
    if covered and not uncertain and not divided(student, begun + candidate):
        return candidate
    return candidate[: cut(student, begun, candidate)]


def divided(student: Side, text: str) -> bool:
    """True if the student's first token of a text is shorter than the text, also of the frequent
    tokens that begin with it."""
    first = first_token(student, text)
    if first == text or not text.startswith(first):
        return False
    longer = [t for _, t in sorted(student.tokens.items()) if t != text and t.startswith(text)]
    return not any(first_token(student, t).startswith(text) for t in longer[:COVERING])


def first_token(student: Side, text: str) -> str:
    """Return the first token of a text, or what is not text."""
    return student.encode(text)[0] if is_utf8(text) else text


def cut(student: Side, begun: str, candidate: str) -> int:
    """Characters of a candidate up to the end of the student's first token beyond ``begun``."""
    whole = begun + candidate
    lengths = [len(candidate) for token in student.tokens.values() if token.startswith(whole)][:1]
    for after in CONTINUATIONS if ord(candidate[-1]) < 256 else ():
        if not is_utf8(whole):
            continue
        first = student.encode(whole + after)[0]
        if len(first) > len(begun) and (first.startswith(whole) or whole.startswith(first)):
            lengths.append(min(len(first) - len(begun), len(candidate)))
    return min(lengths, default=0)


def value(
    boundary: Boundary, divergence: str, *, inside: bool, teacher_weight: float = 0.5
) -> float:
    """Nats on (cells, rest); the student's rest has a floor inside one of its tokens."""
    student = [*boundary.student.values()]
    student.append(max(1 - math.fsum(student), TAIL_MARGIN))
    reachable = [c for c, p in boundary.student.items() if p > 0]
    # Cells that no token of the student begins with are rest; those not sought are removed below.
    is_named = {c: c in reachable or c in boundary.unsought for c in boundary.teacher}
    teacher = [mass if is_named[c] else 0.0 for c, mass in boundary.teacher.items()]
    teacher.append(1 - math.fsum(teacher))
    if not reachable:
        return 0.0
    student_flags, teacher_flags = (
        [*(c in cells for c in boundary.student), True]
        for cells in (boundary.student_lacks[0], boundary.teacher_lacks[0])
    )
    names = [*boundary.student, ""]
    teacher = [
        min(t, s) if name in boundary.unsought else t
        for name, t, s in zip(names, teacher, student, strict=True)
    ]
    total = math.fsum(teacher)
    teacher = [t / total for t in teacher] if total else teacher
    if END in boundary.student:
        at = names.index(END)
        moved = min(max(student[at] - teacher[at], 0.0), teacher[-1])
        teacher[at], teacher[-1] = teacher[at] + moved, teacher[-1] - moved
    known_student, known_teacher = student, teacher
    for _ in range(3):
        bound = boundary.teacher_lacks[1]
        teacher = filled(known_teacher, student, teacher_flags, bound)
        student = filled(
            known_student,
            teacher,
            student_flags,
            boundary.student_lacks[1],
            [boundary.most.get(name, 1.0) for name in names],
            boundary.counted,
        )
    if inside:
        student = floored_rest(student, teacher[-1])
    if divergence == "forward_kl":
        return _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, floored_rest(teacher, student[-1]))
    if divergence == "entropy_aware_kl":
        teacher = floored_rest(teacher, student[-1])
        entropy = -math.fsum(t * math.log(t) for t in teacher if t > 0)
        forward = _kl(teacher, student) if entropy > _ENTROPY_THRESHOLD else 0.0
        return _kl(student, teacher) + forward
    share = teacher_weight
    mixture = [share * t + (1 - share) * s for t, s in zip(teacher, student, strict=True)]
    return share * _kl(teacher, mixture) + (1 - share) * _kl(student, mixture)


def filled(
    known: Sequence[float],
    towards: Sequence[float],
    lacking: Sequence[bool],
    bound: float,
    most: Sequence[float] = (),
    least: float = 0.0,
) -> list[float]:
    """Raise lacking entries to a level of the other side's shares, the highest that adds at most
    the bound and leaves no share above the other side's; scaled to sum to one.

    Entries lack at most a share of the other side's. If one lacks its most, the level adds what is
    certain, for any shares.

    Args:
        most: 1 for any.
    """

    if bound == 0:
        return list(known)
    shares = [k / math.fsum(known) for k in known]
    limits = [
        k + m * t * (1 + bound) if m < 1 else math.inf
        for k, t, m in zip(shares, towards, most or [1.0] * len(shares), strict=True)
    ]

    def raised(level: float, *, is_limited: bool) -> list[float]:
        entries = zip(shares, towards, lacking, limits, strict=True)
        return [
            max(k, min(level * t, limit if is_limited else math.inf)) if lacks else k
            for k, t, lacks, limit in entries
        ]

    def highest(*, is_limited: bool, is_certain: bool) -> float:
        def is_allowed(level: float) -> bool:
            total = math.fsum(raised(level, is_limited=is_limited))
            if is_certain:
                return total - 1 <= min(least, bound)
            return total - 1 <= bound and level <= total

        low, high = 0.0, 1.0 + bound
        while high < 1e14 and is_allowed(high):
            low, high = high, high * 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if is_allowed(middle) else (low, middle)
        return low

    def level(*, is_limited: bool) -> float:
        levels = (highest(is_limited=is_limited, is_certain=each) for each in (False, True))
        return max(levels)

    complete = level(is_limited=False)
    entries = zip(shares, towards, lacking, limits, strict=True)
    if any(lacks and max(k, complete * t) > limit for k, t, lacks, limit in entries):
        towards = [*towards[:-1], max(towards[-1], _LEAST_SHARE)]
        values = raised(level(is_limited=True), is_limited=True)
    else:
        values = raised(highest(is_limited=False, is_certain=False), is_limited=False)
    return [value / math.fsum(values) for value in values]


def per_token(student: Side, teacher: Side, divergence: str, mass_floor: float) -> list[float]:
    """Nats at each of the student's tokens."""
    results = [0.0] * len(student.realised)
    compared = boundaries(student, teacher)
    texts = {boundary.at: boundary.teacher_text for boundary in compared}
    for boundary in compared:
        weight = min(1.0, boundary.teacher_mass / mass_floor) if mass_floor else 1.0
        start, mass = boundary.token or (-1, 1.0)
        is_inside = start in texts
        if is_inside:
            ratio = boundary.teacher_text / texts[start] / mass
            over_teacher = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(divergence, 0.5)
            weight *= over_teacher * min(ratio, HIGHEST_RATIO) + 1 - over_teacher
        results[boundary.position] += weight * value(boundary, divergence, inside=is_inside)
    return results


def _kl(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)
