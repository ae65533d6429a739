"""A prompt that the student cannot read is found before the run."""

from pathlib import Path

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.rendering import RENDERED, require_renderable
from mopd_trainer.student import Student
from mopd_trainer.student_identity import StudentIdentity
from tests import tiny_models
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
            require_renderable(prompts(5, refused), identity(), source=Path("data.jsonl"))
        assert str(told.value) == (
            f"data.jsonl: prompt {refused + 1}: the student's chat template refuses messages of "
            "roles system, user: no system"
        )


def test_a_long_file_is_looked_into_no_further_than_its_first_prompts() -> None:
    student, source = identity(), Path("data.jsonl")
    require_renderable(prompts(RENDERED + 1, RENDERED), student, source=source)
    with pytest.raises(DataError, match=f"prompt {RENDERED}: "):
        require_renderable(prompts(RENDERED + 1, RENDERED - 1), student, source=source)
