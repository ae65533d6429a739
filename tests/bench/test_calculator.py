"""The calculator's conversations: both tokenizers spell them, and a right student is right."""

import asyncio
from dataclasses import replace

import pytest

from bench.calculator import (
    AGENT,
    TOOL,
    calculated,
    conversation,
    expressions,
    tokenizer_of,
)
from mopd.demo.models import build_model
from mopd_protocol.messages import Message
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.agents.sampler import AgentSampler
from mopd_trainer.rollouts.reference_turns import reply_token_ids
from mopd_trainer.student.identity import StudentIdentity
from tests.trainer.rollouts.agents.scripted_student import ScriptedGenerator


def test_held_out_expressions_are_not_trained() -> None:
    known, held_out = expressions(held_out=False), expressions(held_out=True)
    assert {*known}.isdisjoint(held_out)
    assert len(known) + len(held_out) == 30_000
    assert 0.15 < len(held_out) / 30_000 < 0.25


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*14", "518"), ("3-14", "-11"), ("99+1", "100"), ("1/0", "error"), ("1+2+3", "error")],
)
def test_calculated(expression: str, value: str) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(("numbers", "vocabulary"), [(True, 1500), (False, 340)])
def test_turns_of_the_data_solve_the_exercise(numbers: bool, vocabulary: int) -> None:
    tokenizer = tokenizer_of(numbers=numbers, vocabulary=vocabulary)
    identity = StudentIdentity.of(build_model("qwen3", tokenizer, 0), tokenizer)
    student = replace(identity, max_length=None)  # the script has tokens of single bytes
    messages = tuple(Message.model_validate(each) for each in conversation("37*14"))
    prompt = Prompt(0, messages[:1], {}, tools=(TOOL,))
    turns = [
        Prompt(0, messages[:place], {}, tools=(TOOL,), reply=messages[place]) for place in (1, 3)
    ]
    ids = [reply_token_ids(turn, student) for turn in turns]
    assert max(map(len, ids)) < 40
    names = {token_id: name for name, token_id in student.table.controls.items()}
    texts = [
        "".join(names.get(each) or student.table.bytes_of(each).decode() for each in turn)
        for turn in ids
    ]

    async def run() -> list[Rollout]:
        config = RolloutConfig.model_validate({"max_new_tokens": 40, "agent": AGENT})
        sampler = AgentSampler(ScriptedGenerator(student, texts), student, config, seed=0)
        [batch] = [batch async for batch in sampler.sample([prompt], step=0)]
        return batch.rollouts

    first, last = asyncio.run(run())
    assert (first.turn, last.turn) == (0, 1)
    assert last.completion.text == b"518"
    assert [m.role for m in last.prompt.messages] == ["user", "assistant", "tool"]
