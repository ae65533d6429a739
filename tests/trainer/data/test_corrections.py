"""Corrections of implausible tokens."""

from collections.abc import Sequence

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

#: A row of a teacher: the probability of the completion's token, and the likeliest token with its
#: own, or None where the completion's is the likeliest.
Choice = tuple[float, str, float] | None


def example(
    token_ids: Sequence[int],
    candidates: Sequence[Sequence[int]],
    choices: Sequence[Choice],
) -> TrainingExample:
    """A student's completion, its likeliest ids, and a score with one likeliest id in each row."""
    student, teacher = table(STUDENT), table(TEACHER)
    width = max(map(len, candidates))
    topk_ids = np.array([[*row, *[-1] * (width - len(row))] for row in candidates])
    sampled = rollout(STUDENT, token_ids, topk_ids=topk_ids)
    view = text_view(sampled, student, teacher)
    assert isinstance(view.request.completion, str)
    ids = encoder(TEACHER).encode(view.request.completion)
    ids += [teacher.roles.ending[0]] if view.request.finished else []
    completion = teacher.sequence(ids)
    rows = [
        (ids[at], 0.9, 0.9) if choice is None else (named(choice[1], teacher), choice[2], choice[0])
        for at, choice in enumerate(choices)
    ]
    likeliest, highest, own = map(np.array, zip(*rows, strict=True))
    topk = TopKLogprobs(
        ids=likeliest[:, None],
        logprobs=np.log(highest)[:, None],
        token_logprobs=np.log(own),
        tail_logprobs=np.log1p(-highest),
    )
    score = TeacherScore("m" * 32, completion, topk)
    aligned = AlignedScore("math", 1.0, view, score, align(view.completion, completion))
    return TrainingExample(sampled, (aligned,))


def named(text: str, side: TokenTable) -> int:
    return side.controls[text] if text in side.controls else side.all_bytes.index(text.encode())


def corrected(item: TrainingExample, ratio: float = RATIO) -> Correction | None:
    return correction_of(
        item,
        table(STUDENT),
        {"math": table(TEACHER)}.__getitem__,
        least_ratio=ratio,
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


_PIECES = ["1", "12", "2", "27", "7", "+", " + "]


@st.composite
def _examples(draw: st.DrawFn) -> tuple[TrainingExample, Sequence[Choice]]:
    pieces = draw(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5))
    written = ids_of(STUDENT, *pieces)
    vocabulary = sorted({i for piece in _PIECES for i in ids_of(STUDENT, piece)})
    candidates = [draw(st.permutations(vocabulary)) for _ in written]
    text = table(STUDENT).sequence(written).text.decode()
    rows = len(encoder(TEACHER).encode(text))
    choice = st.none() | st.tuples(
        st.sampled_from([0.001, 0.3]), st.sampled_from("127+ "), st.just(0.6)
    )
    choices = [draw(choice) for _ in range(rows)]
    return example(written, candidates, choices), choices


@given(_examples())
def test_corrections_agree_with_the_definition(
    drawn: tuple[TrainingExample, Sequence[Choice]],
) -> None:
    item, choices = drawn
    own, other = table(STUDENT).all_bytes, table(TEACHER).all_bytes
    ids = item.scores[0].score.completion.token_ids.tolist()
    teacher = [
        (other[i], 0.9, other[i], 0.9) if c is None else (other[i], c[0], c[1].encode(), c[2])
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
    correction = corrected(item)
    expected = reference(student, teacher, RATIO)
    assert (None if correction is None else [own[i] for i in correction.token_ids]) == expected
