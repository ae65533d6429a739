"""Lookaheads: the teacher's rows behind likely tokens that a completion does not continue with."""

from functools import cache

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
    tokenizer("whole_number"), table("whole_number"), logit_width=512, parameters=0, trained=0
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


async def scored(count: int) -> tuple[list[AlignedScore], Recorded]:
    transport = Recorded(service().app)
    config = teacher_config(loss={"type": "prefix_kl", "lookaheads": count}, top_k=12)
    rollouts = [
        rollout("whole_number", ids_of("whole_number", text, "<|end|>"), index=at)
        for at, text in enumerate(TEXTS)
    ]
    async with scorer_of(STUDENT, {"math": (transport, config)}) as scorer:
        examples = await scorer.score(rollouts)
    return [score for example in examples for score in example.scores], transport


async def test_a_lookahead_is_the_row_behind_the_teachers_likely_token() -> None:
    scores, transport = await scored(2)
    looked = [(score, each) for score in scores for each in score.lookaheads or ()]
    assert len(looked) > 5
    assert len(transport.requests) == 2
    assert max(len(score.lookaheads or ()) for score in scores) <= 2
    prompt = service().tokenizer.tokenize(scores[0].teacher_input.request).prompt_ids
    for score, each in looked:
        token = int(score.score.topk.ids[each.teacher_row, 0])
        assert token != score.score.completion.token_ids[each.teacher_row]
        before = score.score.completion.token_ids[: each.teacher_row].tolist()
        exact = next_token_logprobs(service().model, [*prompt, *before, token], service().real_ids)
        ids = each.following.ids[0].tolist()
        expected = [exact[token] for token in ids]
        np.testing.assert_allclose(each.following.logprobs[0], expected, atol=1e-4)


async def test_a_run_without_lookaheads_sends_the_completions_only() -> None:
    scores, transport = await scored(0)
    assert all(score.lookaheads is None for score in scores)
    assert len(transport.sequences) == len(TEXTS)


async def test_recorded_lookaheads_are_loaded_unchanged() -> None:
    scores, _ = await scored(2)
    for score in scores:
        assert score.lookaheads is not None
        arrays = lookahead_arrays("3.math", score.lookaheads, score.score.topk.k)
        loaded = load_lookaheads("3.math", arrays)
        assert loaded is not None
        assert [_values(each) for each in loaded] == [_values(each) for each in score.lookaheads]
    assert load_lookaheads("3.math", {}) is None


def _values(lookahead: Lookahead) -> tuple[object, ...]:
    row = lookahead.following
    columns = (row.ids, row.logprobs, row.token_logprobs, row.tail_logprobs)
    return lookahead.student_row, lookahead.teacher_row, *(column.tolist() for column in columns)
