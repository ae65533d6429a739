"""The doctor's check of the end of a turn, on sound losses and on those without one event."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mopd_losses.build import build_loss
from mopd_losses.core.loss import Loss
from mopd_losses.ends.one_end_loss import OneEndLoss
from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.samples import Message, Prompt
from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_trainer.config.loading import parse_run
from mopd_trainer.diagnostics.ends import check_ends
from mopd_trainer.reporting.plan import describe_plan
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher, teacher_of
from tests.client.scripted_teacher import manifest
from tests.losses.ends.problems import EQUAL, Ends
from tests.trainer.in_process import teacher_config
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, tokenizer

LOSSES = ("auto", "prefix_kl", "ctkd", "policy_gradient", "k2", "k3", "gold", "uld", "alm", "simct")


def connected(ends: Ends, **settings: Any) -> tuple[Teacher, Loss]:
    student = StudentIdentity(
        tokenizer("digit"), ends.student.table, ends.student.logit_width, parameters=0, trained=0
    )
    sides = TeacherTokenizer(ends.teacher.tokenizer, ends.teacher.table, ends.teacher.encoder)
    config = teacher_config(**settings)
    teacher = teacher_of("math", config, manifest(), sides, student, ProjectionCache())
    return teacher, build_loss(teacher.config.loss, student, sides, CPU)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", EQUAL)
def test_every_loss_has_one_end(case: str, name: str) -> None:
    teacher, loss = connected(EQUAL[case], loss={"type": name})
    [finding] = check_ends({"math": teacher}, {"math": loss})
    assert (finding.check, finding.status) == ("ends", "ok")
    assert finding.numbers["nats"] <= 1e-3


@pytest.mark.parametrize("case", ["other tokens", "two other tokens", "the same two"])
def test_a_loss_that_compares_ids_is_found(case: str) -> None:
    teacher, loss = connected(EQUAL[case], loss={"type": "auto"})
    assert isinstance(loss, OneEndLoss)
    [finding] = check_ends({"math": teacher}, {"math": loss.inner})
    assert finding.status == "failed"


def test_a_teacher_without_an_end_is_found() -> None:
    ends = EQUAL["one token"]
    teacher, loss = connected(ends)
    without = TeacherTokenizer(
        ends.teacher.tokenizer,
        type(ends.teacher.table).from_tokenizer(ends.teacher.tokenizer, TokenRoles()),
        ends.teacher.encoder,
    )
    teacher = teacher_of(
        "math", teacher.config, teacher.manifest, without, teacher.student, ProjectionCache()
    )
    [finding] = check_ends({"math": teacher}, {"math": loss})
    assert finding.status == "failed"


@pytest.mark.parametrize(("case", "shown"), [("one token", 0), ("other tokens", 1)])
def test_the_plan_names_ends_that_differ(case: str, shown: int, tmp_path: Path) -> None:
    teacher, _ = connected(EQUAL[case])
    config = parse_run(run_values(tmp_path), source="run")
    prompt = Prompt(0, (Message(role="user", content="1 + 1"),), {"math": 1.0})
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(describe_plan(config, [prompt], teacher.student, {"math": teacher}))
    text = console.export_text()
    assert text.count("compared as one event") == shown
    assert ("student ends with <|end|>, teacher 'math' with <|pad|>" in text) == bool(shown)
