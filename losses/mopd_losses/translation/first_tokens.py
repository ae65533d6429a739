"""``FirstTokens``: which tokens a student may write first, for all texts that a teacher may mean.

A teacher's tokens are the beginning of many texts. Both tokenizers are called for the text with
continuations: those that the teacher's tokenizer divides into the same tokens show which token the
student's tokenizer would write. If it is always one, the teacher's mass is the mass of that token.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.translation.continuations import Continuations
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

#: Results in memory; beyond, all are discarded and computed again.
_MOST_RESULTS = 500_000

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Beginning(NamedTuple):
    """Text, and how both sides have divided what is before it and the text itself."""

    student_ids: tuple[int, ...]  # the student's tokens before the text that may depend on it
    text: str
    teacher_ids: tuple[int, ...]  # up to the end of the text, from where it matters


class Division(NamedTuple):
    """Tokens of the teacher, and text that follows them."""

    teacher_ids: tuple[int, ...]
    text: str


class FirstTokens:
    """Cached results of two tokenizers."""

    def __init__(self, student: Vocabulary, teacher: Vocabulary) -> None:
        self._student, self._teacher = student, teacher
        self._continuations = Continuations((student, teacher))
        self._sets: dict[tuple[Beginning, bool], frozenset[int]] = {}
        self._divisions: dict[Division, bool] = {}

    def of(
        self, trials: Iterable[tuple[Beginning, bool]]
    ) -> dict[tuple[Beginning, bool], frozenset[int]]:
        """Return the tokens that the student may write first, and ``INCOMPATIBLE``, ``ANY`` or
        ``NO_TOKEN``.

        Args:
            trials: beginnings, and whether many continuations are tried.
        """
        trials = [*trials]
        self._compute_sets(_missing(self._sets, trials))
        return {each: self._sets[each] for each in trials}

    def _compute_sets(self, missing: Sequence[tuple[Beginning, bool]]) -> None:
        self._decide_without_continuations(missing)
        untried = {each: self._trials(*each) for each in missing if each not in self._sets}
        pairs = [pair for tried in untried.values() for pair in tried]
        student = _written(self._student, (own for own, _ in pairs))
        teacher = _written(self._teacher, (other for _, other in pairs))
        for (beginning, thorough), tried in untried.items():
            count = len(beginning.teacher_ids)
            same = [
                own
                for own, other in tried
                if tuple(teacher[other][:count]) == beginning.teacher_ids
            ]
            # Tokens that the tokenizer never writes for text are the teacher's own choice.
            texts = same or [own for own, _ in tried]
            first = {self._next_token(beginning, student[own]) for own in texts}
            first |= self._longer_tokens(beginning)
            self._sets[beginning, thorough] = frozenset(first or {ANY})

    def _decide_without_continuations(self, beginnings: Sequence[tuple[Beginning, bool]]) -> None:
        """Decide texts that nothing can follow, or whose first token no continuation changes."""
        texts: dict[tuple[Beginning, bool], str] = {}
        for beginning, thorough in beginnings:
            string = self._student.spelled(beginning.student_ids) + beginning.text
            ended = is_control(string[-1])
            text = utf8_text(string[:-1] if ended else string)
            if text is not None:
                texts[beginning, thorough] = text
            elif ended:
                self._sets[beginning, thorough] = frozenset({ANY})
        written = _written(self._student, texts.values())
        for (beginning, thorough), text in texts.items():
            token = self._next_token(beginning, written[text])
            if is_control(beginning.text[-1]) or self._is_decided(beginning, token):
                self._sets[beginning, thorough] = frozenset({token})

    def _is_decided(self, beginning: Beginning, token: int) -> bool:
        """Return whether text is divided behind the first token before any continuation."""
        if token < 0:
            return False
        text = beginning.text
        ends = range(max(len(self._student.strings[token]), 1), len(text))
        return any(not self._student.joins(text[end - 1], text[end]) for end in ends)

    def ended(self, beginnings: Sequence[Beginning]) -> list[int]:
        """Return the token that the student writes first if text is divided behind a beginning.

        It is ``UNDECIDED`` for half a character, and behind white space and digits, which some
        tokenizers divide by what is behind them.
        """
        strings = [self._student.spelled(each.student_ids) + each.text for each in beginnings]
        texts = [utf8_text(string) or "" for string in strings]
        written = _written(self._student, texts)
        pairs = zip(beginnings, texts, strict=True)
        return [
            UNDECIDED
            if not text or text[-1].isspace() or text[-1].isnumeric()
            else self._next_token(beginning, written[text])
            for beginning, text in pairs
        ]

    def _longer_tokens(self, beginning: Beginning) -> set[int]:
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

    def may_write(self, divisions: Iterable[Division]) -> dict[Division, bool]:
        """Return whether the teacher's tokenizer may write these tokens before the text."""
        divisions = [*divisions]
        self._compute_divisions(_missing(self._divisions, divisions))
        return {each: self._divisions[each] for each in divisions}

    def _compute_divisions(self, missing: Sequence[Division]) -> None:
        trials: dict[Division, list[str]] = {}
        for each in missing:
            string = self._teacher.spelled(each.teacher_ids) + each.text
            texts = (utf8_text(string + end) for end in self._continuations.behind(string))
            trials[each] = [text for text in texts if text is not None]
        written = _written(self._teacher, (text for each in trials.values() for text in each))
        for division, texts in trials.items():
            count = len(division.teacher_ids)
            self._divisions[division] = any(
                tuple(written[text][:count]) == division.teacher_ids for text in texts
            )

    def _trials(self, beginning: Beginning, thorough: bool) -> list[tuple[str, str]]:
        """Return a student's and a teacher's text for each continuation."""
        student = self._student.spelled(beginning.student_ids) + beginning.text
        teacher = self._teacher.spelled(beginning.teacher_ids)
        ends = dict.fromkeys(self._continuations.behind(student, thorough=thorough))
        start = len(student) - len(beginning.text)
        for token in (None, *reversed(beginning.student_ids)):
            start -= len(self._student.strings[token]) if token is not None else 0
            string = student[start:]
            for longer in self._student.longer_tokens(string, _LONGER_TOKENS):
                spelled = self._student.strings[longer]
                further = self._continuations.likeliest(spelled) if thorough else ()
                for end in ("", *further):
                    ends[spelled[len(string) :] + end] = None
        pairs = ((utf8_text(student + end), utf8_text(teacher + end)) for end in ends)
        return [(own, other) for own, other in pairs if own is not None and other is not None]

    def _next_token(self, beginning: Beginning, ids: Sequence[int]) -> int:
        """Return the student's token behind the ones before, or ``INCOMPATIBLE``."""
        before = beginning.student_ids
        if tuple(ids[: len(before)]) != before:
            return INCOMPATIBLE
        if len(ids) > len(before):
            return ids[len(before)]
        last = beginning.text[-1]
        return self._student.control_ids.get(last, NO_TOKEN if is_control(last) else ANY)


def _missing(known: dict[Key, Result], keys: Iterable[Key]) -> list[Key]:
    """Return the keys that are not cached, once each."""
    keys = dict.fromkeys(keys)
    if len(known) + len(keys) > _MOST_RESULTS:
        known.clear()
    return [key for key in keys if key not in known]


def _written(side: Vocabulary, texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the token ids of each text."""
    distinct = [*dict.fromkeys(texts)]
    return dict(zip(distinct, side.encode(distinct), strict=True)) if distinct else {}
