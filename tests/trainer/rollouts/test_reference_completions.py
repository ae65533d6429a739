"""Reference answers as completions: the data's text in the student's tokens, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.trainer.students import CPU, MESSAGES, model_of, student_of

STUDENTS = {family: student_of(family) for family in ("qwen", "llama", "gpt_neox")}
#: With surrogates there would be no bytes.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def prompt_of(reference: str | None, index: int = 0) -> Prompt:
    return Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}, answer=reference)


def reader_of(
    family: str = "qwen", *, scored: bool = True, max_length: int | None = None, **settings: Any
) -> ReferenceCompletions:
    config = RolloutConfig.model_validate({"max_new_tokens": 200, **settings})
    return ReferenceCompletions(
        STUDENTS[family].identity, config, max_length=max_length, scored=scored
    )


def read(reference: str, family: str = "qwen") -> Rollout:
    [rollout] = reader_of(family).rollouts([prompt_of(reference)], step=3)
    return rollout


@given(reference=TEXTS)
@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_a_reference_has_the_text_of_the_data_and_ends_the_turn(
    family: str, reference: str
) -> None:
    student, rollout = STUDENTS[family], read(reference, family)
    assert rollout.completion.text == reference.encode()
    assert rollout.finish_reason == "stop"
    *written, ending = rollout.completion.token_ids.tolist()
    assert ending == student.table.roles.ending[0]
    assert set(student.table.roles.ending).isdisjoint(written)
    assert rollout.prompt_token_ids.tolist() == student.prompt_token_ids(MESSAGES)


def test_a_reference_ends_with_the_end_of_a_turn_not_of_the_text() -> None:
    own = tiny_models.digit_tokenizer()
    own.chat_template = str(own.chat_template).replace("eos_token", "'<|end|>'")
    own.eos_token = "<|pad|>"
    identity = Student(model_of("qwen"), own, CPU).identity
    assert len(identity.table.roles.ending) == 2
    reader = ReferenceCompletions(
        identity, RolloutConfig(max_new_tokens=9), max_length=None, scored=True
    )
    [rollout] = reader.rollouts([prompt_of("7")], step=0)
    assert int(rollout.completion.token_ids[-1]) == own.convert_tokens_to_ids("<|end|>")


def test_a_reference_has_no_sampled_logprobs() -> None:
    rollout = read("7")
    assert rollout.sampled_logprobs is None
    assert (rollout.source, rollout.policy_version) == ("answers", 3)
    [unread] = reader_of(scored=False).rollouts([prompt_of("7")], step=3)
    assert (dict(rollout.prompt.teachers), dict(unread.prompt.teachers)) == ({"math": 1.0}, {})


@pytest.mark.parametrize("family", STUDENTS)
def test_a_reference_is_tokenized_as_a_continuation(family: str) -> None:
    """No space that only the beginning of a text has, no token that begins a text."""
    student = STUDENTS[family]
    ids = read("the quick", family).completion.token_ids.tolist()
    pieces = [student.table.bytes_of(token_id) for token_id in ids[:-1]]
    assert b"".join(pieces) == b"the quick"
    assert student.table.roles.bos not in ids


def test_a_reference_longer_than_max_new_tokens_is_dropped_and_counted() -> None:
    tokens = len(read("12 + 30 = 42").completion)
    prompts = [prompt_of("12 + 30 = 42", 0), prompt_of("7", 1)]
    for longest, kept in ((tokens, [0, 1]), (tokens - 1, [1])):
        reader = reader_of(max_new_tokens=longest)
        assert [r.prompt.index for r in reader.rollouts(prompts, step=0)] == kept
        assert reader.pop_dropped() == ({} if len(kept) == 2 else {"answer_too_long": 1})
        assert reader.pop_dropped() == {}


def test_a_reference_that_exceeds_the_context_is_dropped_and_counted() -> None:
    room = len(STUDENTS["qwen"].prompt_token_ids(MESSAGES)) + len(read("12 + 30").completion)
    for limit, dropped in ((room, 0), (room - 1, 1)):
        reader = reader_of(max_length=limit)
        assert len(reader.rollouts([prompt_of("12 + 30")], step=0)) == 1 - dropped
        assert reader.pop_dropped()["answer_too_long"] == dropped


@pytest.mark.anyio
async def test_references_come_in_batches_in_order_and_once_each() -> None:
    reader = reader_of(generation_batch_size=2, samples_per_prompt=5)
    prompts = [prompt_of(str(index), index) for index in range(5)]
    batches = [batch async for batch in reader.sample(prompts, step=1)]
    actual = [[rollout.completion.text for rollout in batch.rollouts] for batch in batches]
    assert actual == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert [batch.place for batch in batches] == [0, 2, 4]


def test_a_prompt_without_a_reference_raises() -> None:
    with pytest.raises(DataError, match="prompt 4: no reference answer"):
        reader_of().rollouts([prompt_of(None, 4)], step=0)
