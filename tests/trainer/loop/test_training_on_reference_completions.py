"""Complete runs on reference answers: plain SFT, scored by teachers, and both sources at once."""

import asyncio
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Message
from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.student.student import Student
from tests.reference.sampling import greedy
from tests.trainer.runs import run_values, write_lines
from tests.trainer.students import CPU, table, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_cut_off, run_here

pytestmark = pytest.mark.slow

SOLVED = {"1 + 2 =": "3", "2 + 5 =": "7", "add": "def add(a, b)", "fox": "the quick brown fox"}


def solved_lines(teachers: tuple[str, ...] = ("math", "code")) -> list[object]:
    return [
        {"prompt": prompt, "solution": reference, "teacher": teachers[at % len(teachers)]}
        for at, (prompt, reference) in enumerate(SOLVED.items())
    ]


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Return a run of plain SFT on four reference answers, without teachers."""
    write_lines(tmp_path / "prompts.jsonl", solved_lines())
    values = run_values(tmp_path, teachers={}, logging={"tensorboard": False})
    values["data"] |= {"source": "answers", "answer_key": "solution"}
    values["student"] |= {"model": str(models["student"]), "distill_loss_weight": 0.0}
    values["rollout"]["max_new_tokens"] = 20
    return values


def taught(values: dict[str, Any], addresses: dict[str, str]) -> dict[str, Any]:
    teachers = {name: {"url": url, "top_k": 16} for name, url in addresses.items()}
    return {**values, "teachers": teachers}


def test_plain_sft_learns_the_references_without_teachers(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    values["student"] |= {"learning_rate": 1e-2, "weight_decay": 0.0}
    folder, output = run_here(values, max_steps=60)
    lines = journal(tmp_path / "run")
    losses = [line["sft/loss_per_token"] for line in lines]
    assert losses[0] > 5  # a fresh model is uniform over 420 tokens: ln 420 = 6.04
    assert losses[-1] < 0.05
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert lines[0]["answers/samples"] == 4
    assert lines[0]["answers/tokens"] == lines[0]["tokens/trained"]
    assert lines[0]["rollout/samples"] == 0
    assert not [key for key in lines[0] if key.startswith("teacher/")]
    assert "loss 0.0" in output
    assert "(sft 0.0" in output

    student = AutoModelForCausalLM.from_pretrained(folder)
    reader = Student(student, tokenizer("digit"), CPU)
    real = table("digit").present.nonzero()[0].tolist()
    for problem, reference in SOLVED.items():
        prompt = reader.prompt_token_ids((Message(role="user", content=problem),))
        written = greedy(student, prompt, real, table("digit").roles.ending, 20)
        assert table("digit").sequence(written).text.decode() == reference


def test_scores_of_reference_answers_are_learnt_from(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    """Off-policy distillation: the student never writes, and comes closer all the same."""
    values = taught(values, addresses)
    values["student"] |= {"learning_rate": 1e-2, "distill_loss_weight": 1.0}
    run_here(values, max_steps=40)
    lines = journal(tmp_path / "run")
    for name in addresses:
        losses = [line[f"teacher/{name}/loss_per_token"] for line in lines]
        assert losses[-1] < 0.5 * losses[0]
        assert lines[-1][f"teacher/{name}/scored_tokens"] > 0
    assert {line["rollout/samples"] for line in lines} == {0}
    # A fresh teacher has not learnt these references, so neither has its student.
    assert lines[-1]["sft/loss_per_token"] > 3


def mixed(values: dict[str, Any], addresses: dict[str, str]) -> dict[str, Any]:
    values = taught(values, addresses)
    values["data"]["on_policy_fraction"] = 0.5
    values["student"]["distill_loss_weight"] = 0.4
    # A fresh student babbles bytes: some completions have nothing that a teacher can score.
    values["rollout"]["samples_per_prompt"] = 6
    return {**values, "max_steps": 6, "save_steps": 2}


def test_a_resumed_mixture_continues_as_if_uninterrupted(
    tmp_path: Path,
    values: dict[str, Any],
    addresses: dict[str, str],
) -> None:
    values = mixed(values, addresses)
    uninterrupted, _ = run_here(values, output_dir=str(tmp_path / "uninterrupted"))
    run_cut_off(values, in_step=4)
    folder, output = run_here(values, resume_from_checkpoint=True)
    assert "resumed after step 2" in output
    assert_same_weights(folder, uninterrupted)
    actual, expected = journal(tmp_path / "run"), journal(tmp_path / "uninterrupted")
    for key in ("loss", "sft/loss_per_token", "answers/tokens", "rollout/tokens"):
        assert [line[key] for line in actual] == [line[key] for line in expected]
    assert [line["answers/samples"] for line in actual] == [2] * 6
    assert all(0 < line["rollout/samples"] <= 12 for line in actual)
    assert all(math.isfinite(line["sft/loss_per_token"]) for line in actual)


def test_logged_completions_name_their_source(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    run_here({**mixed(values, addresses), "max_steps": 2, "logging": {"completions": 1}})
    text = (tmp_path / "run" / "completions.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["source"] for line in lines] == ["answers", "rollout"] * 2
    for line in lines[::2]:
        assert line["completion"] == SOLVED[line["prompt"][0]["content"]]
        assert line["finish_reason"] == "stop"
        assert len(line["teachers"]) == 1


def test_without_distillation_only_sampled_completions_are_scored(
    tmp_path: Path, values: dict[str, Any], addresses: dict[str, str]
) -> None:
    values = mixed(values, addresses)
    values["student"]["distill_loss_weight"] = 0.0
    run_here(values, max_steps=2)
    for line in journal(tmp_path / "run"):
        scored = sum(line[f"teacher/{name}/tokens"] for name in addresses)
        assert scored == line["rollout/tokens"] > 0
        assert line["answers/tokens"] > 0


def test_reference_answers_that_are_too_long_are_dropped_and_counted(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    values["rollout"]["max_new_tokens"] = 4
    run_here(values)
    for line in journal(tmp_path / "run"):
        assert line["dropped/answer_too_long"] == 2
        assert line["answers/samples"] == 2


def plan_of(values: dict[str, Any]) -> str:
    output = StringIO()
    asyncio.run(check_run(RunConfig.model_validate(values), Console(file=output, width=300)))
    return output.getvalue()


def test_a_check_prints_the_sources_and_the_unused_teachers(
    values: dict[str, Any], addresses: dict[str, str]
) -> None:
    output = plan_of(values)
    assert "100% of prompts with reference answers: cross entropy only (SFT)" in output
    assert "about 0.0 MB of scores per step" in output
    unreachable = {"math": {"url": "http://127.0.0.1:9"}}  # to contact it would fail
    assert "math not contacted (student.distill_loss_weight is 0)" in plan_of(
        {**values, "teachers": unreachable}
    )
    output = plan_of(mixed(values, addresses))
    assert (
        "50% of prompts with reference answers: cross entropy 0.6, distillation 0.4; 50% on-policy"
    ) in output
    assert "prefix_kl forward_kl on the teacher's top 16, weight 1, 2 prompts" in output


def test_a_prompt_that_the_student_cannot_read_ends_a_run_before_its_first_step(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    template = Path(values["student"]["model"]) / "chat_template.jinja"
    refusing = "{% if messages[0].content == 'fox' %}{{ raise_exception('no foxes') }}{% endif %}"
    whole = template.read_text()
    template.write_text(refusing + whole)
    try:
        for command in (run_here, plan_of):
            with pytest.raises(DataError, match=r"prompts.jsonl: prompt 4: .*user: no foxes"):
                command(values)
    finally:
        template.write_text(whole)
    assert not (tmp_path / "run").exists()
