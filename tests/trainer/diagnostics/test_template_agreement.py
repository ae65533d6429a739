"""Chat templates of student and teacher: which settings make them agree, in check and doctor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mopd_client.pool import TeacherPool
from mopd_client.teacher_client import TeacherClient
from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.config.loading import parse_run
from mopd_trainer.diagnostics.examination import cheap_findings
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.diagnostics.template_agreement import check_agreement_of_templates
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import connect_teachers
from tests import tiny_models
from tests.chat_templates import TEMPLATES, chat_tokenizer
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, teacher_config
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, model_of

pytestmark = pytest.mark.anyio

ONE = [("user", "3 + 4 =")]
TURNS = [*ONE, ("assistant", "<think>\nfour more\n</think>\n\n7"), ("user", "5 + 4 =")]


def prompt(index: int, *messages: tuple[str, str], **options: Any) -> Prompt:
    turns = tuple(Message(role=role, content=content) for role, content in messages)
    return Prompt(index=index, messages=turns, teachers=options or {"math": 1.0})


async def findings_of(
    student: str, teacher: str, prompts: list[Prompt], **variables: Any
) -> list[Finding]:
    """Return the findings for a student and a teacher behind HTTP, with these families' templates.

    Args:
        variables: of the student's template.
    """
    own = Student(
        model_of("qwen"),
        chat_tokenizer(student),
        CPU,
        chat_template_kwargs=variables,
    )
    app = teacher_of(model_of("qwen"), chat_tokenizer(teacher)).app
    config = teacher_config()
    client = TeacherClient("math", config.url, transport=Recorded(app))
    async with TeacherPool({"math": client}) as pool:
        teachers = await connect_teachers(
            pool, {"math": config}, own.identity, ProjectionCache(), {}, wait_seconds=60.0
        )
    return list(check_agreement_of_templates(prompts, own.identity, teachers))


@pytest.mark.parametrize(
    ("student", "teacher", "messages", "fix", "agreeing"),
    [
        ("qwen_3", "qwen_2", ONE, "You are a helpful assistant.", {}),
        ("llama_3", "llama_3_1", ONE, "", {}),
        ("chatml", "qwen_3", TURNS, "thinking of earlier turns", {}),
        ("chatml", "llama_3", [("user", " 3 + 4 =\n")], "spaces", {}),
        (
            "qwen_3",
            "chatml",
            ONE,
            "student.chat_template_kwargs={enable_thinking: true}",
            {"enable_thinking": True},
        ),
    ],
)
async def test_settings_that_agree_are_offered(
    student: str, teacher: str, messages: Any, fix: str, agreeing: dict[str, Any]
) -> None:
    prompts = [prompt(0, ("user", "2")), prompt(6, *messages)]
    variables = {"enable_thinking": False} if agreeing else {}
    if variables or messages is ONE:
        prompts = prompts[1:]
    (finding,) = await findings_of(student, teacher, prompts, **variables)
    assert finding.status == "warning"
    assert finding.numbers["prompt"] == 7
    assert fix in finding.fix
    if agreeing:
        (finding,) = await findings_of(student, teacher, prompts, **agreeing)
        assert finding.status == "ok"


async def test_dates_can_be_set() -> None:
    """The other date, which one of the two templates has by a variable."""
    TEMPLATES["llama_3_2"] = TEMPLATES["llama_3_1"].replace("26 Jul 2024", "01 Dec 2025")
    try:
        (finding,) = await findings_of("llama_3_1", "llama_3_2", [prompt(0, *ONE)])
        assert finding.status == "warning"
        assert '{date_string: "01 Dec 2025"}' in finding.fix
        same = {"date_string": "01 Dec 2025"}
        (finding,) = await findings_of("llama_3_1", "llama_3_2", [prompt(0, *ONE)], **same)
        assert finding.status == "ok"
    finally:
        del TEMPLATES["llama_3_2"]


async def test_offered_system_messages_agree() -> None:
    system = ("system", "You are a helpful assistant.")
    prompts = [prompt(n, system, ("user", f"{n} + 4 =")) for n in range(3)]
    (finding,) = await findings_of("chatml", "qwen_2", prompts)
    assert finding.status == "ok"


async def test_a_rare_form_is_compared_and_a_rejected_role_is_named() -> None:
    plain = [prompt(n, ("user", f"{n} + 4 =")) for n in range(200)]
    (finding,) = await findings_of("chatml", "qwen_3", [*plain, prompt(200, *TURNS)])
    assert finding.numbers["prompt"] == 201
    (finding,) = await findings_of("chatml", "gemma", [prompt(0, ("system", "Add."), *ONE)])
    assert finding.status == "warning"
    assert "system" in finding.text


async def test_the_doctor_and_the_check_compare_templates(tmp_path: Path) -> None:
    student = Student(model_of("qwen"), chat_tokenizer("chatml"), CPU)
    app = teacher_of(model_of("qwen"), chat_tokenizer("qwen_2")).app
    config = teacher_config()
    client = TeacherClient("math", config.url, transport=Recorded(app))
    async with TeacherPool({"math": client}) as pool:
        teachers = await connect_teachers(
            pool, {"math": config}, student.identity, ProjectionCache(), {}, wait_seconds=60.0
        )
    tiny_models.save(student.model, chat_tokenizer("chatml"), tmp_path / "student")
    run = parse_run(run_values(tmp_path), source="run")
    findings = [*cheap_findings(run, [prompt(0, *ONE)], student.identity, teachers)]
    warnings = [each for each in findings if each.status == "warning" and each.check == "templates"]
    assert [each.numbers["prompt"] for each in warnings] == [1]
    # Without the files of the template there is nothing to compare.
    unknown = replace(teachers["math"].tokenizer, files={})
    teachers = {"math": replace(teachers["math"], tokenizer=unknown)}
    assert not [*check_agreement_of_templates([prompt(0, *ONE)], student.identity, teachers)]
    assert json.dumps(warnings[0].numbers)
