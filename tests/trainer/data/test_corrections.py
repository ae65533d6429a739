"""Corrections of implausible tokens."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.corrections import Correction, correction_of
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.teacher_input import text_view
from tests.reference.corrections import correction as reference
from tests.trainer.students import encoder, ids_of, rollout, table

STUDENT, TEACHER = "whole_number", "digit"
RATIO = 0.1
ENDING = table(TEACHER).roles.ending

#: A row of a teacher: the probability of the completion's token, the likeliest token with its own,
#: and less likely tokens; or None where the completion's is the likeliest.
Choice = tuple[float, str, float, *tuple[str, ...]] | None
#: Probability of each of the less likely tokens.
LITTLE = 0.01
#: More than the implausible tokens of any completion here.
ALWAYS = 100.0


def example(
    token_ids: Sequence[int],
    candidates: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    teacher_name: str = TEACHER,
) -> TrainingExample:
    """A student's completion, its likeliest ids, and a score with likely ids in each row."""
    student, teacher = table(STUDENT), table(teacher_name)
    width = max(map(len, candidates))
    topk_ids = np.array([[*row, *[-1] * (width - len(row))] for row in candidates])
    sampled = rollout(STUDENT, token_ids, topk_ids=topk_ids)
    view = text_view(sampled, student, encoder(teacher_name))
    assert isinstance(view.request.completion, str)
    ids = encoder(teacher_name).encode(view.request.completion)
    ids += [teacher.roles.ending[0]] if view.request.finished else []
    completion = teacher.sequence(ids)
    rows = [
        ([ids[at]], 0.9, 0.9)
        if choice is None
        else ([named(each, teacher) for each in (choice[1], *choice[3:])], choice[2], choice[0])
        for at, choice in enumerate(choices)
    ]
    likely = np.full((len(rows), max(len(row) for row, *_ in rows)), -1)
    logprobs = np.full(likely.shape, -np.inf)
    for at, (row, highest, _) in enumerate(rows):
        likely[at, : len(row)] = row
        logprobs[at, : len(row)] = np.log([highest, *[LITTLE] * (len(row) - 1)])
    topk = TopKLogprobs(
        ids=likely,
        logprobs=logprobs,
        token_logprobs=np.log([own for *_, own in rows]),
        tail_logprobs=np.log1p(-np.exp(logprobs).sum(axis=1)),
    )
    score = TeacherScore("m" * 32, completion, topk)
    aligned = AlignedScore("math", 1.0, view, score, align(view.completion, completion))
    return TrainingExample(sampled, (aligned,))


def named(text: str, side: TokenTable) -> int:
    return side.controls[text] if text in side.controls else side.all_bytes.index(text.encode())


def corrected(
    item: TrainingExample,
    ratio: float = RATIO,
    teacher_name: str = TEACHER,
    significance: float = ALWAYS,
) -> Correction | None:
    return correction_of(
        item,
        table(STUDENT),
        {"math": table(teacher_name)}.__getitem__,
        least_ratio=ratio,
        significance=significance,
    )


def test_the_first_implausible_token_is_replaced_by_the_likeliest_that_agrees() -> None:
    # 12 is one token of the student; the teacher would have written 1|7.
    written = ids_of(STUDENT, "12", "+")
    likely = ids_of(STUDENT, "12", "3", "17", "1")
    correction = corrected(example(written, [likely, written], [None, (0.01, "7", 0.9), None]))
    assert correction is not None
    assert (correction.kept, correction.token_id) == (0, ids_of(STUDENT, "17")[0])


@pytest.mark.parametrize(
    ("choice", "ratio"),
    [((0.2, "7", 0.7), RATIO), ((0.01, "7", 0.9), 0.001), (None, RATIO)],
    ids=["plausible", "smaller ratio", "likeliest"],
)
def test_plausible_tokens_stay(choice: Choice, ratio: float) -> None:
    written = ids_of(STUDENT, "12")
    assert corrected(example(written, [ids_of(STUDENT, "17")], [None, choice]), ratio) is None


@pytest.mark.parametrize(("significance", "is_corrected"), [(0.19, False), (0.21, True)])
def test_a_completion_stays_where_the_teachers_own_has_implausible_tokens(
    significance: float, is_corrected: bool
) -> None:
    # 0.1 of each row is outside of the top-k.
    written = ids_of(STUDENT, "12")
    item = example(written, [ids_of(STUDENT, "17")], [None, (0.01, "7", 0.9)])
    assert (corrected(item, significance=significance) is not None) == is_corrected


def test_few_of_the_teachers_own_samples_are_corrected_however_long_they_are() -> None:
    draw = random.Random(0)
    digits, written = list("0123"), ids_of(STUDENT, *"0123")

    def sample() -> TrainingExample:
        ids: list[int] = []
        choices: list[Choice] = []
        for _ in range(60):
            best, *others = draw.sample(range(4), 4)
            own = draw.choices([best, *others], [0.97, LITTLE, LITTLE, LITTLE])[0]
            ids.append(written[own])
            named = [digits[each] for each in others]
            choices.append((0.96 if own == best else LITTLE, digits[best], 0.96, *named))
        return example(ids, [written] * 60, choices)

    samples = [sample() for _ in range(300)]
    shares = {
        significance: np.mean(
            [corrected(each, RATIO, TEACHER, significance) is not None for each in samples]
        )
        for significance in (0.1, ALWAYS)
    }
    assert shares[0.1] < 0.1
    assert shares[ALWAYS] > 0.7


def test_a_token_beyond_the_teachers_does_not_begin_with_its_other_tokens() -> None:
    # The student prefers 45; the teacher has a token for it, and prefers 4 before another text.
    written = ids_of(STUDENT, "3", "+")
    likely = ids_of(STUDENT, "45", "4", "42")
    for others, best in (([], "45"), (["45"], "4"), (["42"], "45")):
        choices = [(0.001, "4", 0.9, *others), None]
        item = example(written, [likely, written], choices, STUDENT)
        correction = corrected(item, teacher_name=STUDENT)
        assert correction is not None
        assert correction.token_ids == ids_of(STUDENT, best)


def test_a_completion_stays_where_no_likely_token_agrees() -> None:
    written = ids_of(STUDENT, "12")
    assert corrected(example(written, [written], [None, (0.01, "7", 0.9)])) is None


def test_a_completion_may_end_earlier_or_later() -> None:
    ending = table(STUDENT).roles.ending[0]
    control = next(n for n, i in table(TEACHER).controls.items() if i in ENDING)
    written = [*ids_of(STUDENT, "12"), ending]
    early = corrected(example(written, [written, written], [(0.01, control, 0.9), None, None]))
    assert early is not None
    assert early.token_ids == [ending]
    likely = [written, ids_of(STUDENT, "3")]
    later = corrected(example(written, likely, [None, None, (0.01, "3", 0.9)]))
    assert later is not None
    assert later.token_ids == ids_of(STUDENT, "12", "3")


def test_an_end_does_not_give_way_to_another_end_of_the_teacher() -> None:
    own = table(TEACHER)
    roles = own.roles.model_copy(update={"other_ends": (own.controls["<|pad|>"],)})
    end = table(STUDENT).roles.ending[0]
    item = example(
        [*ids_of(STUDENT, "12"), end], [[end], [end]], [None, None, (0.01, "<|pad|>", 0.9)]
    )
    tables = {"one end": own, "two ends": replace(own, roles=roles)}
    for each in tables.values():
        arguments = {"least_ratio": RATIO, "significance": ALWAYS}
        assert correction_of(item, table(STUDENT), lambda _, each=each: each, **arguments) is None


def test_a_reference_answer_stays() -> None:
    written = ids_of(STUDENT, "12")
    item = example(written, [ids_of(STUDENT, "17")], [None, (0.01, "7", 0.9)])
    assert corrected(item) is not None
    reference_completion = Rollout(
        item.rollout.prompt,
        item.rollout.prompt_token_ids,
        item.rollout.completion,
        None,
        "length",
        0,
    )
    assert corrected(TrainingExample(reference_completion, item.scores)) is None


@pytest.mark.parametrize(
    ("sampled", "likeliest"),
    [("45", "4"), ("4", "45")],
    ids=["longer than the teacher's", "its beginning, which no likely token continues"],
)
def test_a_token_gives_way_to_the_teachers(sampled: str, likeliest: str) -> None:
    written = ids_of(STUDENT, sampled, "+")
    likely = ids_of(STUDENT, sampled, likeliest)
    choices = [(0.001, likeliest, 0.9), None]
    item = example(written, [likely, written], choices, STUDENT)
    correction = corrected(item, teacher_name=STUDENT)
    assert correction is not None
    assert correction.token_ids == ids_of(STUDENT, likeliest)


def test_a_token_that_could_have_been_longer_is_replaced_by_the_longer_one() -> None:
    # The student's tokenizer would not divide 45, so that a 5 behind the 4 would mislead it.
    written = ids_of(STUDENT, "4", "+")
    likely = [ids_of(STUDENT, "4", "42", "45"), ids_of(STUDENT, "+", "5")]
    correction = corrected(example(written, likely, [None, (0.001, "5", 0.9)]))
    assert correction is not None
    assert correction.token_ids == ids_of(STUDENT, "45")


def test_a_token_that_begins_the_teachers_stays_and_the_next_one_is_replaced() -> None:
    written = ids_of(STUDENT, "4", "+")
    choices = [(0.001, "45", 0.9), None]
    for next_token, expected in (("5", ["4", "5"]), ("2", None)):
        likely = [ids_of(STUDENT, "4"), ids_of(STUDENT, next_token)]
        correction = corrected(example(written, likely, choices, STUDENT), teacher_name=STUDENT)
        token_ids = None if correction is None else correction.token_ids
        assert token_ids == (None if expected is None else ids_of(STUDENT, *expected))


_PIECES = ["4", "45", "2", "42", "5", "+", " + "]


@st.composite
def _examples(draw: st.DrawFn) -> tuple[TrainingExample, Sequence[Choice], str]:
    teacher = draw(st.sampled_from([STUDENT, TEACHER]))
    pieces = draw(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5))
    written = ids_of(STUDENT, *pieces)
    vocabulary = sorted({i for piece in _PIECES for i in ids_of(STUDENT, piece)})
    likely = st.lists(st.sampled_from(vocabulary), min_size=1, unique=True)
    candidates = [draw(likely) for _ in written]
    text = table(STUDENT).sequence(written).text.decode()
    rows = len(encoder(teacher).encode(text))
    tokens = [*"425+ ", *(["45", "42"] if teacher == STUDENT else [])]
    choices: list[Choice] = []
    for _ in range(rows):
        best = draw(st.lists(st.sampled_from(tokens), max_size=3, unique=True))
        own = draw(st.sampled_from([0.001, 0.3]))
        choices.append((own, best[0], 0.6, *best[1:]) if best else None)
    return example(written, candidates, choices, teacher), choices, teacher


@given(_examples(), st.sampled_from([0.35, 0.75, ALWAYS]))
def test_corrections_agree_with_the_definition(
    drawn: tuple[TrainingExample, Sequence[Choice], str], significance: float
) -> None:
    item, choices, name = drawn
    own, other = table(STUDENT).all_bytes, table(name).all_bytes
    ids = item.scores[0].score.completion.token_ids.tolist()
    teacher = [
        (other[i], 0.9, [(other[i], 0.9)])
        if c is None
        else (other[i], c[0], [(c[1].encode(), c[2]), *((t.encode(), LITTLE) for t in c[3:])])
        for i, c in zip(ids, choices, strict=True)
    ]
    assert item.rollout.student_topk_ids is not None
    student = [
        (own[i], [own[c] for c in row if c >= 0])
        for i, row in zip(
            item.rollout.completion.token_ids.tolist(),
            item.rollout.student_topk_ids.tolist(),
            strict=True,
        )
    ]
    correction = corrected(item, teacher_name=name, significance=significance)
    expected = reference(student, teacher, RATIO, significance)
    assert (None if correction is None else [own[i] for i in correction.token_ids]) == expected
