"""``FirstTokens``: which tokens a student may write first, for all texts that a teacher may mean.

A teacher's tokens are the beginning of many texts. Both tokenizers are called for the text with
continuations: those that the teacher's tokenizer divides into the same tokens show which token the
student's tokenizer would write. If it is always one, the teacher's mass is the mass of that token.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.translation.continuations import Continuations
from mopd_losses.translation.rows import Integers
from mopd_losses.translation.vocabulary import Vocabulary, is_control

#: In a set of tokens: the text may be divided so that the tokens before it are others.
INCOMPATIBLE = -1

#: In a set of tokens: any token is possible.
ANY = -2

#: In a set of tokens: none, because the text is a control token of the teacher only.
NO_TOKEN = -3

#: In place of a token: the student may write several.
UNDECIDED = -4

#: Longer tokens of the student that are tried behind each beginning.
_LONGER_TOKENS = 32

#: Strings with longer tokens in memory; beyond, all are discarded.
_MOST_ENDS = 50_000

#: Above every token id.
_STEP = 1 << 32


class Text(NamedTuple):
    """Text of a teacher at a position, and how both sides divide what is before it."""

    student_ids: tuple[int, ...]  # the student's tokens before the position that may depend on it
    teacher_ids: tuple[int, ...]  # up to the end of the text, from where it matters
    text: str  # from the position on; empty if the tokens end at or before it
    missing: str  # text between the end of the tokens and the position


class FirstTokens:
    """Calls two tokenizers."""

    def __init__(self, student: Vocabulary, teacher: Vocabulary) -> None:
        self._student, self._teacher = student, teacher
        self._continuations = Continuations((student, teacher))
        self._ends: dict[tuple[str, bool], dict[str, None]] = {}

    def of(self, texts: Sequence[tuple[Text, bool]]) -> list[frozenset[int]]:
        """Return the tokens that the student may write first for each text, and ``INCOMPATIBLE``,
        ``ANY`` or ``NO_TOKEN``.

        Args:
            texts: and whether many continuations are tried.
        """
        sets = self._without_continuations([text for text, _ in texts])
        unknown = [number for number, each in enumerate(sets) if each is None]
        untried = [texts[number][0] for number in unknown]
        trials = [self.trials(*texts[number]) for number in unknown]
        which = np.repeat(np.arange(len(trials)), [len(each.student) for each in trials])
        written = _Written(self._student, [own for each in trials for own in each.student])
        before = [text.student_ids for text in untried]
        ended = [self._ended(text) for text in untried]
        tokens = np.where(
            written.begins_with(before, which),
            written.token_at(np.array([*map(len, before)], dtype=np.int64)[which], ended, which),
            INCOMPATIBLE,
        )
        likely = self._likely_tokens(untried, trials, which, tokens)
        for number, text, first in zip(unknown, untried, likely, strict=True):
            sets[number] = frozenset(first | self._longer_tokens(text) or {ANY})
        return [each for each in sets if each is not None]

    def _likely_tokens(
        self,
        untried: Sequence[Text],
        trials: Sequence["Trials"],
        which: Integers,
        tokens: Integers,
    ) -> list[set[int]]:
        """Return the tokens of trials that the teacher's tokenizer divides as it did, or all.

        Few calls decide most texts: one trial of each token, then the others of the tokens that
        it did not show; none where all have one token.
        """
        likely: list[set[int]] = [set() for _ in trials]
        firsts = np.cumsum([0, *(len(each.student) for each in trials)])
        groups, first, group = np.unique(
            which * _STEP + tokens - UNDECIDED, return_index=True, return_inverse=True
        )
        owners, members = groups // _STEP, groups % _STEP + UNDECIDED
        single = np.bincount(owners, minlength=len(trials))[owners] == 1
        for owner, member in zip(owners[single].tolist(), members[single].tolist(), strict=True):
            likely[owner].add(member)
        shown = single.copy()
        teacher_ids = [text.teacher_ids for text in untried]
        rest = np.ones(len(tokens), dtype=np.bool_)
        rest[first] = False
        for tried in (first[~single], np.flatnonzero(rest)):
            tried = tried[~shown[group[tried]]]
            texts = [
                trials[owner].teacher(at)
                for owner, at in zip(
                    which[tried].tolist(), (tried - firsts[which[tried]]).tolist(), strict=True
                )
            ]
            same = _Written(self._teacher, texts).begins_with(teacher_ids, which[tried])
            shown[group[tried[same]]] = True
        # Tokens that the tokenizer never writes for text are the teacher's own choice.
        any_shown = np.bincount(owners[shown], minlength=len(trials)) > 0
        for at in np.flatnonzero(~single & (shown | ~any_shown[owners])).tolist():
            likely[owners[at]].add(int(members[at]))
        return likely

    def _without_continuations(self, texts: Sequence[Text]) -> list[frozenset[int] | None]:
        """Decide texts that nothing can follow, or whose first token no continuation changes."""
        strings = [self._student.spelled(each.student_ids) + each.text for each in texts]
        ended = [is_control(string[-1]) for string in strings]
        parts = [
            utf8_text(string[:-1] if end else string)
            for string, end in zip(strings, ended, strict=True)
        ]
        written = iter(self._student.encode([part for part in parts if part is not None]))
        sets: list[frozenset[int] | None] = []
        for text, part, end in zip(texts, parts, ended, strict=True):
            token = ANY if part is None else self._next_token(text, next(written))
            is_certain = end or (part is not None and self._is_decided(text, token))
            sets.append(frozenset({token}) if is_certain else None)
        return sets

    def _is_decided(self, beginning: Text, token: int) -> bool:
        """Return whether text is divided behind the first token before any continuation."""
        if token < 0:
            return False
        text = beginning.text
        ends = range(max(len(self._student.strings[token]), 1), len(text))
        return any(not self._student.joins(text[end - 1], text[end]) for end in ends)

    def ended(self, beginnings: Sequence[Text]) -> list[int]:
        """Return the token that the student generates first if text is divided behind a beginning.

        It is ``UNDECIDED`` for half a character, and behind white space and digits, which some
        tokenizers divide by what is behind them.
        """
        strings = [self._student.spelled(each.student_ids) + each.text for each in beginnings]
        texts = [utf8_text(string) or "" for string in strings]
        written = zip(beginnings, texts, self._student.encode(texts), strict=True)
        return [
            UNDECIDED
            if not text or text[-1].isspace() or text[-1].isnumeric()
            else self._next_token(beginning, ids)
            for beginning, text, ids in written
        ]

    def _longer_tokens(self, beginning: Text) -> set[int]:
        """Return the student's tokens that begin with the text of one token of the teacher, which
        divides them behind it."""
        if beginning.student_ids or len(beginning.teacher_ids) != 1:
            return set()
        [token] = beginning.teacher_ids
        return (
            self._divided.get(token, set())
            if self._teacher.strings[token] == beginning.text
            else set()
        )

    @cached_property
    def _divided(self) -> dict[int, set[int]]:
        """Teacher's token -> longer tokens of the student that the teacher begins with it."""
        texts = {token: utf8_text(string) for token, string in enumerate(self._student.strings)}
        known = [(token, text) for token, text in texts.items() if text]
        divided: defaultdict[int, set[int]] = defaultdict(set)
        written = self._teacher.encode([text for _, text in known])
        for (token, _), ids in zip(known, written, strict=True):
            if len(ids) > 1:
                divided[ids[0]].add(token)
        return divided

    def may_write(self, texts: Sequence[Text]) -> list[bool]:
        """Return whether the teacher's tokenizer may write each text's tokens before what is
        missing."""
        trials: list[str] = []
        counts: list[int] = []
        for each in texts:
            string = self._teacher.spelled(each.teacher_ids) + each.missing
            tried = (utf8_text(string + end) for end in self._continuations.behind(string))
            before = len(trials)
            trials += [text for text in tried if text is not None]
            counts.append(len(trials) - before)
        which = np.repeat(np.arange(len(texts)), counts)
        same = _Written(self._teacher, trials).begins_with(
            [each.teacher_ids for each in texts], which
        )
        return (np.bincount(which[same], minlength=len(texts)) > 0).tolist()

    def trials(self, beginning: Text, thorough: bool) -> "Trials":
        """Return texts with continuations."""
        student = self._student.spelled(beginning.student_ids) + beginning.text
        ends = dict.fromkeys(self._continuations.behind(student, thorough=thorough))
        start = len(student) - len(beginning.text)
        for token in (None, *reversed(beginning.student_ids)):
            start -= len(self._student.strings[token]) if token is not None else 0
            ends.update(self._longer_ends(student[start:], thorough))
        teacher = self._teacher.spelled(beginning.teacher_ids)
        own, other = utf8_text(student), utf8_text(teacher)
        if own is not None and other is not None:
            texts = [end if end.isascii() else utf8_text(end) for end in ends]
            complete = [text for text in texts if text is not None]
            return Trials([own + end for end in complete], other, complete)
        pairs = ((utf8_text(student + end), utf8_text(teacher + end)) for end in ends)
        valid = [(own, other) for own, other in pairs if own is not None and other is not None]
        return Trials([own for own, _ in valid], "", [other for _, other in valid])

    def _longer_ends(self, string: str, thorough: bool) -> dict[str, None]:
        """Return what longer tokens of the student have behind a string, and likely ends of it."""
        if (string, thorough) not in self._ends:
            ends: dict[str, None] = {}
            for longer in self._student.longer_tokens(string, _LONGER_TOKENS):
                spelled = self._student.strings[longer]
                further = self._continuations.likeliest(spelled) if thorough else ()
                for end in ("", *further):
                    ends[spelled[len(string) :] + end] = None
            if len(self._ends) > _MOST_ENDS:
                self._ends.clear()
            self._ends[string, thorough] = ends
        return self._ends[string, thorough]

    def _next_token(self, beginning: Text, ids: Sequence[int]) -> int:
        """Return the student's token behind the ones before, or ``INCOMPATIBLE``."""
        before = beginning.student_ids
        if tuple(ids[: len(before)]) != before:
            return INCOMPATIBLE
        return ids[len(before)] if len(ids) > len(before) else self._ended(beginning)

    def _ended(self, beginning: Text) -> int:
        """Return the student's token behind the ones before if no text is."""
        last = beginning.text[-1]
        return self._student.control_ids.get(last, NO_TOKEN if is_control(last) else ANY)


class Trials(NamedTuple):
    """A beginning with continuations, as text of both sides."""

    student: list[str]
    before: str  # of the teacher's
    ends: list[str]

    def teacher(self, at: int) -> str:
        """Return the teacher's text of a trial."""
        return self.before + self.ends[at]


class _Written:
    """The tokens of texts."""

    def __init__(self, side: Vocabulary, texts: Sequence[str]) -> None:
        self._ids, self._counts = side.encode_arrays(texts)
        self._starts = np.cumsum(self._counts) - self._counts

    def begins_with(
        self, prefixes: Sequence[tuple[int, ...]], which: Integers
    ) -> NDArray[np.bool_]:
        """Return whether each text begins with tokens.

        Args:
            which: [texts], of the prefixes.
        """
        lengths = np.array([*map(len, prefixes)], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        flat = np.array([token for each in prefixes for token in each], dtype=np.int64)
        lengths = lengths[which]
        same = self._counts >= lengths
        for at in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(same & (lengths > at))
            expected = flat[starts[which[longer]] + at]
            same[longer] = self._ids[self._starts[longer] + at] == expected
        return same

    def token_at(self, at: Integers, ended: Sequence[int], which: Integers) -> Integers:
        """Return a token of each text, or ``ended`` if it has no more."""
        inside = self._counts > at
        tokens = np.array(ended, dtype=np.int64)[which]
        tokens[inside] = self._ids[(self._starts + at)[inside]]
        return tokens
