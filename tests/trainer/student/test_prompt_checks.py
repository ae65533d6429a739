"""A prompt that the student cannot read, and a run without room, are found before the run."""

from pathlib import Path

import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.prompt_checks import RENDERED, rendered_lengths, require_answerable
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, QUESTION, model_of

SYSTEM = (Message(role="system", content="be brief"), *QUESTION)


def identity() -> StudentIdentity:
    """Of a student whose template refuses system turns, as Gemma's does."""
    own = tiny_models.digit_tokenizer()
    own.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + str(own.chat_template)
    )
    return Student(model_of("qwen"), own, CPU).identity


def prompts(count: int, refused: int) -> list[Prompt]:
    return [
        Prompt(index=at, messages=SYSTEM if at == refused else QUESTION, teachers={"math": 1.0})
        for at in range(count)
    ]


def test_the_first_prompt_that_the_template_refuses_is_named() -> None:
    for refused in (0, 3):
        with pytest.raises(DataError) as told:
            rendered_lengths(prompts(5, refused), identity(), source=Path("data.jsonl"))
        assert str(told.value) == (
            f"data.jsonl: prompt {refused + 1}: the student's chat template refuses messages of "
            "roles system, user: no system"
        )


def test_a_long_file_is_looked_into_no_further_than_its_first_prompts() -> None:
    student, source = identity(), Path("data.jsonl")
    lengths = rendered_lengths(prompts(RENDERED + 1, RENDERED), student, source=source)
    assert lengths == [len(student.prompt_token_ids(QUESTION))] * RENDERED
    with pytest.raises(DataError, match=f"prompt {RENDERED}: "):
        rendered_lengths(prompts(RENDERED + 1, RENDERED - 1), student, source=source)


def test_a_run_whose_prompts_all_leave_no_room_is_refused(tmp_path: Path) -> None:
    student = identity()
    assert student.max_length == 256
    room = student.max_length - len(student.prompt_token_ids(QUESTION))
    longer = Prompt(index=1, messages=QUESTION * 2, teachers={"math": 1.0})

    def run(max_new_tokens: int, **data: str) -> RunConfig:
        values = run_values(tmp_path)
        values["data"] |= data
        values["rollout"] |= {"max_new_tokens": max_new_tokens}
        return RunConfig.model_validate(values)

    asked = [longer, *prompts(1, refused=-1)]
    require_answerable(run(room), asked, student)  # one is enough
    with pytest.raises(ConfigError, match="the student takes 256 tokens with the prompt, and the"):
        require_answerable(run(room + 1), asked, student)
    require_answerable(run(room + 1, source="answers"), asked, student)  # a limit, and no more
