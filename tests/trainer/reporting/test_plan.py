"""The plan names the formats of the data, what reference answers are for, and repeated prompts."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.reporting.plan import describe_plan
from tests.trainer.data.test_formats import ROWS
from tests.trainer.runs import run_values, write_lines
from tests.trainer.students import student_of


def plan(folder: Path, rows: list[dict[str, Any]], prompts_per_step: int = 1, **data: Any) -> str:
    """Return the plan's lines on the data."""
    values = run_values(folder, teachers={})
    values["data"] |= data
    values["rollout"]["prompts_per_step"] = prompts_per_step
    values["student"]["distill_loss_weight"] = 1 if data.get("source") != "answers" else 0
    if data.get("source") != "answers":
        values["teachers"] = {"math": {"url": "http://127.0.0.1:9", "top_k": 8}}
    config = RunConfig.model_validate(values)
    write_lines(config.data.prompts, rows)
    output = StringIO()
    prompts = read_prompts(config.data, config.scoring_teachers)
    described = describe_plan(config, prompts, student_of().identity, {})
    Console(file=output, width=1_000).print(described)
    lines = output.getvalue().splitlines()
    return "\n".join(line for line in lines if line.startswith(("data ", "warning")))


@pytest.mark.parametrize(("name", "row", "settings"), ROWS)
def test_plan_names_the_format_and_its_reference_answers(
    tmp_path: Path, name: str, row: dict[str, Any], settings: dict[str, Any]
) -> None:
    [sentence] = plan(tmp_path, [row, row], **settings).splitlines()
    assert f"2 of format {name}; the reference answers of 2 prompts" in sentence
    assert "data.source: answers" in sentence
    [sentence] = plan(tmp_path, [row, row], source="answers", **settings).splitlines()
    assert sentence.endswith(f"2 of format {name}")


def test_plan_counts_mixed_formats(tmp_path: Path) -> None:
    rows = [{"prompt": "?"}, {"instruction": "?"}, {"prompt": "!"}]
    assert plan(tmp_path, rows).endswith("2 of format prompt, 1 of format instruction (Alpaca)")


def test_plan_warns_that_prompts_repeat_within_a_step(tmp_path: Path) -> None:
    rows = [{"prompt": "?"}, {"prompt": "!"}]
    assert "warning" not in plan(tmp_path, rows, 2)
    warning = plan(tmp_path, rows, 3).splitlines()[1]
    assert "found 2 prompts" in warning
    assert "rollout.prompts_per_step 3" in warning
