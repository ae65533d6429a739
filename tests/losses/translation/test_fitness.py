"""Fitness of pairs of tokenizers."""

import pytest

from mopd_losses.translation.fitness import SAMPLES, fitness
from tests.trainer.students import encoder, table

PAIRS = [(a, b) for a in ("digit", "sentencepiece") for b in ("whole_number", "digit")]


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_shares_are_those_of_single_tokens(student: str, teacher: str) -> None:
    texts = {"a": "the 12 quick dogs", "b": "漢字 où"}
    own, other = set(table(student).all_bytes), table(teacher).all_bytes

    measured = fitness(table(student), encoder(teacher), texts)

    spelled = [each for each in other if each]
    assert measured.vocabulary == pytest.approx(sum(e in own for e in spelled) / len(spelled))
    for name, text in texts.items():
        tokens = [other[token] for token in encoder(teacher).encode(text)]
        assert measured.texts[name] == pytest.approx(sum(t in own for t in tokens) / len(tokens))


def test_equal_tokenizers_are_fit() -> None:
    measured = fitness(table("digit"), encoder("digit"))

    assert measured.verdict == "fit"
    assert measured.vocabulary == 1.0
    assert measured.texts == dict.fromkeys(SAMPLES, 1.0)


def test_the_verdict_is_that_of_the_first_text() -> None:
    teacher = encoder("whole_number")
    numbers = fitness(table("digit"), teacher, {"numbers": "2045 and 1999 and 42"})
    letters = fitness(table("digit"), teacher, {"letters": "a b c", "numbers": "2045"})

    assert numbers.verdict == "unfit"
    assert letters.verdict == "fit"
    assert letters.verdict in letters.summary
