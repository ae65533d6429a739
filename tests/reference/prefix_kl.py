"""Prefix KL without bounds, by its definition: strings, dictionaries and loops, float64.

What is known by upper bounds only is compared with the exact distributions of both models
(``byte_model``).

A token is its string: a Latin-1 character a byte, one private character for a control token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from mopd_losses.divergences.truncation import TAIL_MARGIN
from mopd_losses.prefix.cells import BOUNDED_SHARE, NAMING_SHARE
from mopd_losses.prefix.loss import HIGHEST_RATIO
from mopd_losses.prefix.naming.cuts import CONTINUATIONS, COVERING
from mopd_losses.prefix.naming.separate_tokens import (
    AFTER_SPACE,
    ENDS,
    FEW,
    LONGEST,
    TOKENS_PER_END,
    TRIED,
    TRIED_DIGITS,
)
from mopd_losses.prefix.vocabulary.shorter_tokens import TRIED as TRIED_AFTER_SHORTER
from tests.reference.divergences import floored_rest

#: Tokens before a boundary that may be divided differently.
_WINDOW = 2
#: Nats; the default of ``entropy_aware_kl``.
_ENTROPY_THRESHOLD = 0.8

WHITE_SPACE = " \t\n\r\v\f\x1c\x1d\x1e\x1f"


@dataclass(frozen=True, eq=False)
class Side:
    """One model on one text."""

    tokens: Mapping[int, str]  # every id that spells anything
    sampled: Sequence[int]
    rows: Sequence[Mapping[int, float]]  # id -> probability, of the ids that are known
    sampled_probabilities: Sequence[float]
    encode: Callable[[str], list[str]]  # a text without control tokens -> its token strings
    block: int = 0  # rows that start before it were conditioned on another text

    @cached_property
    def text(self) -> str:
        return "".join(self.tokens[token] for token in self.sampled)

    @cached_property
    def starts(self) -> list[int]:
        lengths = [len(self.tokens[token]) for token in self.sampled]
        return list(accumulate(lengths, initial=0))[:-1]

    def end(self, row: int) -> int:
        return self.starts[row] + len(self.tokens[self.sampled[row]])

    def covering(self, at: int) -> int | None:
        """The row whose token begins at a byte or covers it."""
        rows = enumerate(self.starts)
        return next((r for r, s in rows if self.block <= s <= at < self.end(r)), None)

    def known(self, row: int) -> dict[int, float]:
        """The probabilities of a row, the sampled token's among them."""
        return {self.sampled[row]: self.sampled_probabilities[row], **self.rows[row]}


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


#: The cell of the student's token that ends at a boundary inside its sampled one.
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
        for at in sorted(start for start in starts if 0 <= start < length):
            boundary = compare(*sides, first + at, second + at, first + length)
            if boundary:
                results.append(boundary)
    return results


def compare(student: Side, teacher: Side, at: int, teacher_at: int, stop: int) -> Boundary | None:
    """One boundary; None if a side's distribution there was conditioned on other text."""
    row, teacher_row = student.covering(at), teacher.covering(teacher_at)
    if row is None or teacher_row is None:
        return None
    ends = student.end(row), teacher.end(teacher_row) - teacher_at + at, stop
    sampled = student.text[at : min(ends)]
    names, unnamed, unlikely, candidates = named_texts(student, teacher, at, teacher_at)
    whole = open_mass(teacher, teacher_at, top_k_only)
    sides = (student, at), (teacher, teacher_at)
    likely = [name for name, is_likely in names.items() if is_likely]
    excepted = {
        c: separate_tokens(*sides, c) if any(name.startswith(c) for name in likely) else {}
        for c in {*names, sampled}
    }
    is_undivided = all(spells_whole(*side, sampled) for side in sides)
    cells: list[str] = []

    def admits(cell: str, string: str) -> bool:
        """True if a string belongs to a cell, without regard to other cells."""
        if not string.startswith(cell):
            return False
        texts = excepted[cell]
        if is_undivided and sampled.startswith(cell) and sampled != cell:
            left = {
                text: not is_excepted or excepts(texts, text)
                for text, is_excepted in excepted[sampled].items()
            }
            texts = {**texts, **left, sampled: True}
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

    def mass(side: Side, at: int, cell: str, known: Vocabulary | None) -> float:
        return cell_mass(side, at, lambda string: cell_of(string) == cell, known)

    shares = {c: mass(teacher, teacher_at, c, top_k_only) / whole for c in cells}
    student_whole = open_mass(student, at, None)
    student_shares = {c: mass(student, at, c, None) / student_whole for c in cells}
    ends_all = [c for c in unnamed if ends_a_token(student, at, c)]
    ending = [unnamed[c] for c in ends_all if not cell_of(c)]
    if ending:
        # Unlikely texts end the token if all likely ones do.
        if len(ends_all) == len(unnamed):
            ending += [share for c, share in unlikely if not cell_of(c)]
        shares[END] = math.fsum(ending)
        token = student.text[student.starts[row] : at]
        own = path(student, at, row, None) * token_mass(student, row, lambda t: t == token)
        student_shares[END] = own / student_whole
    return Boundary(
        at=at,
        position=row,
        student=student_shares,
        teacher=shares,
        teacher_rest=1 - math.fsum(shares.values()),
        teacher_mass=min(1.0, whole),
        teacher_text=math.prod(
            teacher.sampled_probabilities[: open_rows(teacher, teacher_at, top_k_only)[0]]
        )
        * whole,
        token=(
            (start, token_mass(student, row, lambda t: t.startswith(student.text[start:at])))
            if (start := student.starts[row]) < at
            else None
        ),
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
    """The probability of the sampled tokens from the first open row up to this one."""
    return math.prod(side.sampled_probabilities[open_rows(side, at, known)[0] : row])


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


def cell_mass(
    side: Side,
    at: int,
    belongs: Callable[[str], bool],
    known: Vocabulary | None,
) -> float:
    """The mass of the text since the first open row, continued with a string of a cell."""
    total = 0.0
    for row in open_rows(side, at, known):
        begun = side.text[side.starts[row] : at]

        def continues(token: str, begun: str = begun) -> bool:
            return token.startswith(begun) and belongs(token[len(begun) :])

        total += path(side, at, row, known) * token_mass(side, row, continues)
    return total


def excepts(texts: dict[str, bool], string: str) -> bool:
    """True if the longest of these texts with which a string begins is no part of a cell."""
    longest = max((text for text in texts if string.startswith(text)), key=len, default="")
    return texts.get(longest, False)


def separate_tokens(
    student_at: tuple[Side, int], teacher_at: tuple[Side, int], cell: str
) -> dict[str, bool]:
    """Longer tokens of the student, after the byte, and whether they are known to be no part of a
    cell: no text that the student's tokenizer spells with one of them begins with a token of the
    teacher that ends inside it and is in the cell, or in that of a longer token that is part of the
    cell; and no longer text that is one token of the teacher has a token of the student that ends
    after the cell's text, or between it and the token's end."""
    student, teacher = student_at[0], teacher_at[0]
    begun, teacher_begun = (begun_before(*side, cell) for side in (student_at, teacher_at))
    begun_last = student.text[student.starts[open_rows(*student_at, None)[-1]] : student_at[1]]
    own, sampled = (
        side.text[at : side.end(row)]
        for side, at in (student_at, teacher_at)
        for row in [side.covering(at)]
        if row is not None
    )
    # The sampled text shows only what belongs to its own cell, or to one with a longer text.
    shows = min(len(own), len(decided(*student_at, sampled))) <= len(cell)
    shown = [own, sampled] if shows else []
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
        most = TRIED_DIGITS if rest.isdecimal() else TRIED_AFTER_SHORTER
        after += [t[len(rest) :] for t in frequent(teacher, rest, most)]
        after += AFTER_SPACE if text[-1] in WHITE_SPACE else ()
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
    """True if one token, sampled or the tokenizer's, spells a text and perhaps what is before."""
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
    spelled = [r for r, i in enumerate(side.sampled) if ord(side.tokens[i][-1]) < 256]
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


def are_written(side: Side, first: int, at: int) -> bool:
    """True if the tokens from a row on that begin before a byte are the tokenizer's, with all of
    the last one, and with what follows if they end with white space."""
    covering = side.covering(at)
    assert covering is not None
    rows = [r for r in range(first, len(side.starts)) if side.starts[r] < at]
    text = "".join(side.tokens[side.sampled[r]] for r in rows)
    for row in range(first + len(rows), len(side.sampled)):
        token = side.tokens[side.sampled[row]]
        is_divided = text[-1:] in [*WHITE_SPACE] or is_continuation(token[0])
        if not text or not is_divided or ord(token[-1]) > 255:
            break
        text += token
    sampled = [side.tokens[side.sampled[r]] for r in rows]
    return is_utf8(text) and (side.encode(text) if text else [])[: len(rows)] == sampled


def characters(text: str) -> list[int]:
    """Return where the characters of UTF-8 begin in bytes."""
    return [at for at, c in enumerate(text) if at == 0 or not "\x80" <= c < "\xc0"]


def may_cross(side: Side, at: int, cell: str) -> bool:
    """True if a token may consist of the end of the text before a byte, and a cell's beginning."""
    context, _, _ = text_before(side, at)
    tails = [context[n:] for n in range(len(context))]
    crossed = any(t.startswith(x + cell[0]) for x in tails for t in side.tokens.values())
    return crossed and ord(cell[-1]) < 256


def ends_a_token(side: Side, at: int, text: str) -> bool:
    """True if a byte is inside a sampled token, and a shorter token ends at the byte if it is
    followed by a text, and by any other text after that one."""
    context, first, covering = text_before(side, at)
    begun = side.text[side.starts[covering] : at]
    is_text = ord(text[-1]) < 256
    if not begun or (is_text and may_cross(side, at, text)):
        return False
    # No token contains both the end of the context and the text, which matters to white space only.
    is_divided_by_text = is_text and context[-1].isascii() and context[-1].isspace()
    followed = context + text if is_divided_by_text else context
    sampled = [side.tokens[side.sampled[row]] for row in range(first, covering + 1)]
    if not is_utf8(followed) or not are_written(side, first, at):
        return False
    return side.encode(followed)[: len(sampled)] == [*sampled[:-1], begun]


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
            is_likely = share >= BOUNDED_SHARE
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
    sampled = student.text[at : student.end(covering)]
    uncertain = candidate.startswith(sampled) or candidate[-1] in WHITE_SPACE
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
    # Cells that no token of the student begins with are rest.
    teacher = [mass if c in reachable else 0.0 for c, mass in boundary.teacher.items()]
    teacher.append(1 - math.fsum(teacher))
    if not reachable:
        return 0.0
    if END in boundary.student:
        at = [*boundary.student].index(END)
        moved = min(max(student[at] - teacher[at], 0.0), teacher[-1])
        teacher[at], teacher[-1] = teacher[at] + moved, teacher[-1] - moved
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


def per_token(student: Side, teacher: Side, divergence: str, mass_floor: float) -> list[float]:
    """Nats at each of the student's tokens."""
    results = [0.0] * len(student.sampled)
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
