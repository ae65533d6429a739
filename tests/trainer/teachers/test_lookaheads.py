"""Lookaheads: the teacher's rows behind likely tokens that a completion does not continue with."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from mopd_losses.core.loss import Lookahead
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.run_folder.recordings.recorded_lookaheads import load_lookaheads, lookahead_arrays
from mopd_trainer.student.identity import StudentIdentity
from tests.reference.teacher_scores import next_token_logprobs
from tests.server.tiny_teachers import TinyTeacher, teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.students import ids_of, model_of, rollout, table, tokenizer

pytestmark = pytest.mark.anyio

STUDENT = StudentIdentity(
    tokenizer("long_number"), table("long_number"), logit_width=2048, parameters=0, trained=0
)
TEXTS = [f"{at * 37 % 1000} and {at * 91 % 1000}, {at}" for at in range(40)]


@cache
def service() -> TinyTeacher:
    """A confident teacher of single digits, which numbers follow."""
    model = model_of("qwen", sharpness=40.0)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[ids_of("digit", "0123456789")] *= 3
    return teacher_of(model, tokenizer("digit"))


def likely_ids(rows: int) -> np.ndarray:
    """All ids in every row, numbers first that this teacher continues likely digits with."""
    numbers = [ids_of("long_number", text)[0] for text in ("865", "915", "651", "198", "251")]
    others = np.setdiff1d(np.arange(STUDENT.table.size), numbers)
    return np.tile(np.concatenate([numbers, others]), (rows, 1))


async def scored(
    count: int, *, rounds: int = 1, likely: bool = False
) -> tuple[list[AlignedScore], Recorded]:
    transport = Recorded(service().app)
    loss = {"type": "prefix_kl", "lookaheads": count, "lookahead_rounds": rounds}
    config = teacher_config(loss=loss, top_k=12)
    rollouts = [
        rollout("long_number", ids, index=at, topk_ids=likely_ids(len(ids)) if likely else None)
        for at, ids in enumerate(ids_of("long_number", text, "<|im_end|>") for text in TEXTS)
    ]
    async with scorer_of(STUDENT, {"math": (transport, config)}) as scorer:
        examples = await scorer.score(rollouts)
    return [score for example in examples for score in example.scores], transport


@pytest.mark.parametrize(("rounds", "likely"), [(1, False), (1, True), (3, False), (3, True)])
async def test_a_lookahead_has_the_rows_behind_the_teachers_likely_tokens(
    rounds: int, likely: bool
) -> None:
    scores, transport = await scored(2, rounds=rounds, likely=likely)
    looked = [(score, each) for score in scores for each in score.lookaheads or ()]
    assert len(looked) > 5
    assert len(transport.requests) == 1 + rounds
    assert max(len(score.lookaheads or ()) for score in scores) <= 2
    prompt = service().tokenizer.tokenize(scores[0].teacher_input.request).prompt_ids
    for score, each in looked:
        token = int(score.score.topk.ids[each.teacher_row, 0])
        assert token != score.score.completion.token_ids[each.teacher_row]
        before = score.score.completion.token_ids[: each.teacher_row].tolist()
        behind = [*prompt, *before, token]
        assert len(each.following) == len(each.token_ids) + 1
        for row in range(len(each.following)):
            ids = [*behind, *each.token_ids[:row]]
            exact = next_token_logprobs(service().model, ids, service().real_ids)
            expected = [exact[token] for token in each.following.ids[row].tolist()]
            np.testing.assert_allclose(each.following.logprobs[row], expected, atol=1e-4)
    assert (max(len(each.following) for _, each in looked) > 1) == (likely or rounds > 1)


async def test_each_round_of_a_lookahead_continues_with_what_the_teacher_is_sure_of() -> None:
    # Without the student's likely tokens, a text ends with the teacher's: one more in each round.
    chains = [
        {
            (index, each.teacher_row): each.token_ids
            for index, score in enumerate((await scored(2, rounds=rounds))[0])
            for each in score.lookaheads or ()
        }
        for rounds in (1, 2, 3)
    ]
    assert [max(map(len, chain.values())) for chain in chains] == [0, 1, 2]
    for shorter, longer in pairwise(chains):
        assert shorter.keys() == longer.keys()
        assert all(longer[at][: len(ids)] == ids for at, ids in shorter.items())


async def test_a_run_without_lookaheads_sends_the_completions_only() -> None:
    scores, transport = await scored(0)
    assert all(score.lookaheads is None for score in scores)
    assert len(transport.sequences) == len(TEXTS)


async def test_recorded_lookaheads_are_loaded_unchanged() -> None:
    scores, _ = await scored(2, likely=True)
    for score in scores:
        assert score.lookaheads is not None
        arrays = lookahead_arrays("3.math", score.lookaheads, score.score.topk.k)
        loaded = load_lookaheads("3.math", arrays)
        assert loaded is not None
        assert [_values(each) for each in loaded] == [_values(each) for each in score.lookaheads]
    assert load_lookaheads("3.math", {}) is None


async def test_recorded_lookaheads_of_an_earlier_version_have_one_row() -> None:
    scores, _ = await scored(2)
    lookaheads = next(score.lookaheads for score in scores if score.lookaheads)
    arrays = lookahead_arrays("3.math", lookaheads, scores[0].score.topk.k)
    arrays["3.math.lookahead_places"] = arrays["3.math.lookahead_places"][:, :2]
    del arrays["3.math.lookahead_tokens"]
    loaded = load_lookaheads("3.math", arrays)
    assert loaded is not None
    assert [_values(each) for each in loaded] == [_values(each) for each in lookaheads]


def _values(lookahead: Lookahead) -> tuple[object, ...]:
    row = lookahead.following
    columns = (row.ids, row.logprobs, row.token_logprobs, row.tail_logprobs)
    numbers = lookahead.student_row, lookahead.teacher_row, lookahead.token_ids
    return *numbers, *(column.tolist() for column in columns)
