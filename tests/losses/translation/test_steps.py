"""The steps of translation with arrays, compared with their slow forms."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_losses.alignment.byte_strings import control_characters, utf8_text
from mopd_losses.translation.first_tokens import ANY, INCOMPATIBLE, NO_TOKEN, FirstTokens, Text
from mopd_losses.translation.masses import TOLERANCE, Masses
from mopd_losses.translation.rows import Floats, Integers
from mopd_losses.translation.texts import Texts
from mopd_losses.translation.vocabulary import Vocabulary
from tests.reference.translation_steps import PositionMasses, first_tokens
from tests.trainer.students import encoder, table

PAIRS = [(a, b) for a in ("digit", "sentencepiece") for b in ("whole_number", "digit")]
WORDS = ("the", " quick", " dog", "12", " 7", "é", "漢", "\n", "  ", ".", "'s", "Th")


@dataclass(frozen=True, eq=False)
class Sides:
    student: Vocabulary
    teacher: Vocabulary

    @classmethod
    def of(cls, student: str, teacher: str) -> "Sides":
        controls = control_characters(table(student), table(teacher))
        sides = (Vocabulary(table(each), encoder(each), controls) for each in (student, teacher))
        return cls(*sides)


@settings(max_examples=25)
@given(
    st.sampled_from(PAIRS),
    st.sampled_from(WORDS),
    st.sampled_from(WORDS),
    st.integers(0, 2),
    st.booleans(),
)
def test_few_calls_find_what_all_calls_find(
    names: tuple[str, str], before: str, word: str, kept: int, thorough: bool
) -> None:
    sides = Sides.of(*names)
    [student_ids, teacher_ids] = (
        tuple(side.encode([text])[0])
        for side, text in ((sides.student, before), (sides.teacher, before + word))
    )
    string = word.encode().decode("latin-1")
    text = Text(student_ids[len(student_ids) - kept :], teacher_ids, string, "")
    spelled = utf8_text(sides.student.spelled(text.student_ids)) or ""
    tokens = FirstTokens(sides.student, sides.teacher)
    trials = tokens.trials(text, thorough)
    assert all(each.startswith(spelled) for each in trials.student)
    pairs = [(own, trials.teacher(at)) for at, own in enumerate(trials.student)]
    [computed] = tokens.of([(text, thorough)])
    expected = first_tokens(
        pairs,
        lambda text: sides.student.encode([text])[0],
        lambda text: sides.teacher.encode([text])[0],
        text.student_ids,
        text.teacher_ids,
    )
    assert computed == expected


@pytest.mark.parametrize("names", PAIRS)
def test_the_end_of_a_text_decides_what_its_continuations_do(names: tuple[str, str]) -> None:
    """No continuation changes the tokens if none contains the last character and the next."""
    sides = Sides.of(*names)
    texts = Texts(sides.student, sides.teacher, FirstTokens(sides.student, sides.teacher))
    context = np.array([texts.context((), (), "")])
    decided = Counter[bool]()
    for word in WORDS:
        ids = sides.teacher.encode([word])[0]
        first = context
        for token in ids:
            first = texts.longer(first, np.array([token]))
        for following in WORDS:
            token = np.array([sides.teacher.encode([following])[0][0]])
            [computed] = texts.tokens_if_ended(first, sides.teacher.codes_at(token, 0))
            decided[bool(computed >= 0)] += 1
            if computed >= 0:
                sets = texts.sets(texts.longer(first, token), np.array([True]))
                assert texts.certain(sets).tolist() == [computed], (word, following)
    assert decided[True]
    assert decided[False]


@dataclass(frozen=True, eq=False)
class UndecidedMasses:
    positions: Integers
    sets: Integers
    masses: Floats


tokens = st.sampled_from((INCOMPATIBLE, NO_TOKEN, 0, 1, 2, 3))
members = st.frozensets(st.sampled_from((INCOMPATIBLE, ANY, NO_TOKEN, 0, 1, 2, 3, 7)), min_size=1)
shares = st.sampled_from((0.0, 1e-6, 3e-5, 0.013, 0.21, 0.4, 0.77))  # no sum is the tolerance
position_masses = st.builds(
    PositionMasses,
    event=st.integers(0, 3),
    reached=st.sampled_from((0.0, 0.5, 1.3)),
    certain=st.lists(st.tuples(tokens, shares), max_size=5),
    undecided=st.lists(st.tuples(members | st.none(), shares), max_size=5),
)


@given(st.lists(position_masses, max_size=4))
def test_masses_of_arrays_are_those_of_positions(positions: list[PositionMasses]) -> None:
    masses = Masses(np.array([each.event for each in positions], dtype=np.int64), 8)
    numbers = np.arange(len(positions))
    masses.reach(numbers, np.array([each.reached for each in positions]))
    sets: list[frozenset[int]] = []
    undecided: list[tuple[int, int, float]] = []
    for number, each in enumerate(positions):
        for token, mass in each.certain:
            masses.add(np.array([number]), np.array([token]), np.array([mass]))
        for computed, mass in each.undecided:
            if computed is not None:
                sets.append(computed)
            undecided.append((number, -3 if computed is None else len(sets) - 1, mass))
    columns = np.array(undecided, dtype=np.float64).reshape(-1, 3).T
    integers = columns[:2].astype(np.int64)
    arrays = UndecidedMasses(integers[0], integers[1], columns[2])
    computed = masses.probabilities(arrays, sets.__getitem__)
    for number, each in enumerate(positions):
        named = each.named(TOLERANCE)
        own = computed.positions == number
        entries = zip(
            computed.tokens[own].tolist(), computed.probabilities[own].tolist(), strict=True
        )
        assert dict(entries) == pytest.approx({t: p for t, p in named.items() if p > 0})
        assert (np.diff(computed.probabilities[own]) <= 0).all()
        assert computed.realised[number] == pytest.approx(each.realised)
        assert computed.lost[number] == each.lost(named)


@pytest.mark.parametrize("names", [("sentencepiece", "digit"), ("whole_number", "digit")])
def test_longer_tokens_of_the_student_are_possible_behind_their_beginning(
    names: tuple[str, str],
) -> None:
    """No continuation is needed to see a token of which the teacher generates a part first."""
    sides = Sides.of(*names)
    longer = [utf8_text(string) or "" for string in sides.student.strings]
    divided = [(token, text) for token, text in enumerate(longer) if len(text) > 3][:60]
    beginnings = sides.teacher.encode([text for _, text in divided])
    texts = [(Text((), (ids[0],), sides.teacher.strings[ids[0]], ""), False) for ids in beginnings]
    sets = FirstTokens(sides.student, sides.teacher).of(texts)
    for (token, text), ids, possible in zip(divided, beginnings, sets, strict=True):
        written = sides.student.encode([text])[0]
        if len(ids) > 1 and written == [token]:
            assert token in possible, text
