"""A run whose loss is selected by the tokenizers: ``loss: auto``."""

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_trainer.config.loading import load_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.run_folder.checkpoint import Checkpoint
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import run_here

TEACHERS = {"own": ("qwen", "digit"), "other": ("llama", "sentencepiece")}


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    transports = {
        name: Recorded(teacher_of(model_of(family, seed=1, sharpness=8), tokenizer(own)).app)
        for name, (family, own) in TEACHERS.items()
    }
    serve_in_process(monkeypatch, transports)
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(4, list(TEACHERS)))
    folder = tiny_models.save(model_of("qwen"), tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path, max_steps=1, save_steps=1)
    values["student"] |= {"model": str(folder), "min_learning_rate_ratio": 1.0}
    values["rollout"]["samples_per_prompt"] = 4
    values["logging"] = {"tensorboard": False}
    values["teachers"] = {name: {"url": f"http://{name}", "top_k": 8} for name in TEACHERS}
    return values


def test_the_selection_is_shown_and_kept(values: dict[str, Any]) -> None:
    assert RunConfig.model_validate(values).teachers["own"].loss.type == "auto"
    _, console = run_here(values)
    output = Path(values["output_dir"])
    assert console.count("selected by loss 'auto'") == 2
    saved = output / "checkpoints" / "step-00000001"
    assert Checkpoint.open(saved).losses == {"own": "topk_kl", "other": "prefix_kl"}
    notes = (output / "config.yaml").read_text().splitlines()[:2]
    assert [("topk_kl" in line, "prefix_kl" in line) for line in notes] == [
        (True, False),
        (False, True),
    ]
    assert load_run(output / "config.yaml") == RunConfig.model_validate(values)

    state = json.loads((saved / "state.json").read_text())
    state["losses"]["own"] = "prefix_kl"  # as if an earlier version had selected it
    (saved / "state.json").write_text(json.dumps(state))
    run_here(values, resume_from_checkpoint=True, max_steps=2)
    resumed = Checkpoint.open(output / "checkpoints" / "step-00000002")
    assert resumed.losses == {"own": "prefix_kl", "other": "prefix_kl"}


def test_a_name_is_short_for_the_settings_of_a_loss() -> None:
    short, full = (
        TeacherConfig.model_validate({"url": "http://a", "loss": loss})
        for loss in ("gold", {"type": "gold"})
    )
    assert short == full
