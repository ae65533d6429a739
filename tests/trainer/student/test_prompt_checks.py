"""A prompt that the student cannot read, and a run without room, are found before the run."""

from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.prompt_checks import RENDERED, check_prompts, rendered_lengths
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, MESSAGES, model_of

SYSTEM = (Message(role="system", content="be brief"), *MESSAGES)


def identity() -> StudentIdentity:
    """Return the identity of a student whose template rejects system turns, like Gemma's."""
    own = tiny_models.digit_tokenizer()
    own.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + str(own.chat_template)
    )
    return Student(model_of("qwen"), own, CPU).identity


def prompts(count: int, rejected: int) -> list[Prompt]:
    return [
        Prompt(index=at, messages=SYSTEM if at == rejected else MESSAGES, teachers={"math": 1.0})
        for at in range(count)
    ]


def test_the_error_names_the_first_rejected_prompt() -> None:
    for rejected in (0, 3):
        with pytest.raises(DataError, match=f"prompt {rejected + 1}: .* system, user") as caught:
            rendered_lengths(prompts(5, rejected), identity(), source=Path("data.jsonl"))
        assert caught.value.key == "data.jsonl"


def test_only_the_first_prompts_are_rendered() -> None:
    student, source = identity(), Path("data.jsonl")
    lengths = rendered_lengths(prompts(RENDERED + 1, RENDERED), student, source=source)
    assert lengths == [len(student.prompt_token_ids(MESSAGES))] * RENDERED
    with pytest.raises(DataError, match=f"prompt {RENDERED}: "):
        rendered_lengths(prompts(RENDERED + 1, RENDERED - 1), student, source=source)


def test_a_run_without_room_for_any_completion_is_rejected(tmp_path: Path) -> None:
    student = identity()
    assert student.max_length == 256
    room = student.max_length - len(student.prompt_token_ids(MESSAGES))
    longer = Prompt(index=1, messages=MESSAGES * 2, teachers={"math": 1.0})

    def run(max_new_tokens: int, **data: str) -> RunConfig:
        values = run_values(tmp_path)
        values["data"] |= data
        values["rollout"] |= {"max_new_tokens": max_new_tokens}
        return RunConfig.model_validate(values)

    two_prompts = [longer, *prompts(1, rejected=-1)]
    check_prompts(run(room), two_prompts, student)  # one fits
    with pytest.raises(ConfigError) as caught:
        check_prompts(run(room + 1), two_prompts, student)
    assert caught.value.key == "rollout.max_new_tokens"
    check_prompts(run(room + 1, source="answers"), two_prompts, student)  # samples nothing


@pytest.mark.parametrize("source", ["rollout", "answers"])
def test_prompts_longer_than_the_model_are_reported_as_such(tmp_path: Path, source: str) -> None:
    student = identity()
    assert student.max_length is not None
    content = "3 + 4 = " * student.max_length
    prompt = Prompt(0, (Message(role="user", content=content),), {"math": 1.0})
    values = run_values(tmp_path)
    values["data"] |= {"source": source}
    with pytest.raises(DataError, match=f"supports {student.max_length}") as caught:
        check_prompts(RunConfig.model_validate(values), [prompt], student)
    assert caught.value.key == "data.prompts"
