"""Two models of the same few texts have no loss, where texts that were not sampled are divided
otherwise than those that were."""

import pytest

from bench.several_texts import TEXTS, measure


@pytest.mark.parametrize("kind", ["calls", "numbers", "dates", "code", "words", "vietnamese"])
@pytest.mark.parametrize("pair", [("v3", "tekken"), ("v1", "python_50k"), ("python_50k", "v3")])
def test_models_of_the_same_texts_have_no_loss(pair: tuple[str, str], kind: str) -> None:
    assert measure(*pair, TEXTS[kind]) <= 0.01


@pytest.mark.parametrize("kind", ["names", "comments", "columns"])
@pytest.mark.parametrize("pair", [("v3", "tekken"), ("python_50k", "tekken")])
def test_tokens_that_are_written_by_what_follows_have_no_loss(
    pair: tuple[str, str], kind: str
) -> None:
    assert measure(*pair, TEXTS[kind]) <= 0.01


@pytest.mark.parametrize(
    ("student", "teacher", "kind"),
    [
        ("tekken", "v3", "names"),  # ` OS|I` and ` O|SI`
        ("tekken", "v3", "russian"),  # `Пр|ограм`, although `Про` is a token
        ("tekken", "python_50k", "german"),  # `Don|au`, but `D|ona|ud`, also behind a lookahead
        ("python_50k", "tekken", "cjk"),  # `今|年的`, of which the other side sees a byte
        ("python_50k", "tekken", "german"),
        ("tekken", "python_50k", "russian"),
        ("tekken", "v3", "arabic"),  # `الك|تاب`, but `ال|كتب`, behind `الكت`
        ("tekken", "python_50k", "arabic"),  # the same, of which the other side sees a byte
    ],
)
def test_texts_that_are_divided_by_what_follows_later_have_no_loss(
    student: str, teacher: str, kind: str
) -> None:
    assert measure(student, teacher, TEXTS[kind]) <= 0.01


@pytest.mark.parametrize(
    ("student", "teacher", "texts"),
    [
        ("v1", "python_50k", ("alyse", "alyzed", "alyzeer", "alyzer.")),
        ("python_50k", "tekken", (" niveaus", " niveaux de", " niveler", " niveleser")),
    ],
)
def test_a_token_that_may_belong_to_two_cells_has_no_loss(
    student: str, teacher: str, texts: tuple[str, ...]
) -> None:
    assert measure(student, teacher, texts) <= 0.001


@pytest.mark.parametrize(
    ("student", "teacher", "kind"),
    [
        ("v3", "tekken", "bengali"),  # the student spells `ঙ` with its bytes, `ং` with one token
        ("v3", "tekken", "emoji"),
        ("tekken", "v3", "hebrew"),  # `הב` and `ה\xd7|\x91\xd7`
        ("tekken", "v3", "symbols"),  # the teacher's `∑` and `\xe2|\x88|\x80`
        ("tekken", "v3", "emoji"),
    ],
)
def test_characters_that_tokens_divide_have_no_loss(student: str, teacher: str, kind: str) -> None:
    assert measure(student, teacher, TEXTS[kind]) <= 0.001


@pytest.mark.parametrize(
    ("student", "teacher", "kind"),
    [("v3", "tekken", "names"), ("tekken", "v3", "russian"), ("tekken", "python_50k", "german")],
)
def test_a_character_of_several_tokens_before_the_text_changes_nothing(
    student: str, teacher: str, kind: str
) -> None:
    assert measure(student, teacher, tuple(f"𓀀{text}" for text in TEXTS[kind])) <= 0.01


def test_a_candidate_that_begins_with_a_token_of_another_cell_has_no_loss() -> None:
    # The student's `scroll` is no part of `·sc`, but the teacher's longer token is.
    texts = ("yscrollcommander", "yscale.", "yscroll de", "yscrollincrement")
    assert measure("tekken", "v3", texts) <= 0.001


@pytest.mark.parametrize(
    ("student", "teacher", "texts"),
    [
        ("v3", "tekken", ("a     #", "a     y", "a    #", "a    1")),
        ("tekken", "v3", ("a      2", "a    #", "a   1")),
        ("v1", "python_50k", ("a      1", "a      2", "a     x", "a   x")),
    ],
)
def test_runs_of_spaces_that_what_follows_divides_have_no_loss(
    student: str, teacher: str, texts: tuple[str, ...]
) -> None:
    assert measure(student, teacher, texts) <= 0.001


@pytest.mark.parametrize(("student", "teacher"), [("v1", "python_50k"), ("python_50k", "v1")])
def test_of_a_letter_and_the_token_of_its_byte_the_one_that_is_written_counts(
    student: str, teacher: str
) -> None:
    assert measure(student, teacher, TEXTS["german"]) <= 0.006


def test_texts_of_a_kind_differ() -> None:
    assert all(len(set(texts)) == len(texts) > 2 for texts in TEXTS.values())
