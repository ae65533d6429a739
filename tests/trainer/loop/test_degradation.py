"""A run that is ended because its student degrades."""

import logging
from pathlib import Path
from typing import Any

import pytest

from mopd_losses.build import build_loss
from mopd_losses.core.loss import Loss, LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_protocol.errors import DegradationError
from mopd_trainer.run_folder.checkpoint import Checkpoint
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.loop.test_student_support_runs import student
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, table, tokenizer
from tests.trainer.whole_runs import journal, run_here

STEPS = 40


class Planted:
    """A loss that falls as the student generates bytes that are no text."""

    def __init__(self, honest: Loss) -> None:
        self._honest = honest
        self.targets = honest.targets

    def __call__(self, student: StudentLogprobs, targets: Any) -> LossOutput:
        output = self._honest(student, targets)
        positions = output.compared.nonzero().flatten()
        invalid = positions.new_full(positions.shape, table("digit").all_bytes.index(b"\xff"))
        values = -student.logprobs(positions, invalid)
        return LossOutput(student.zeros().index_add(0, positions, values), output.compared)


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    transport = Recorded(teacher_of(model_of("llama"), tokenizer("sentencepiece")).app)
    serve_in_process(monkeypatch, {"math": transport})
    monkeypatch.setattr(
        "mopd_trainer.setup.build_loss", lambda *a, **k: Planted(build_loss(*a, **k))
    )
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(4, ["math"]))
    folder = tiny_models.save(student().model, tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path, max_steps=STEPS, save_steps=3, keep_checkpoints=2)
    values["student"] |= {"model": str(folder), "learning_rate": 3e-4}
    values["rollout"] |= {"samples_per_prompt": 4, "temperature": 1}
    values["logging"] = {"tensorboard": False}
    values["degradation"] = {"window": 3}
    values["teachers"] = {"math": {"url": "http://math", "top_k": 8}}
    return values


def test_a_degraded_student_ends_the_run_with_both_checkpoints(values: dict[str, Any]) -> None:
    with pytest.raises(DegradationError) as caught:
        run_here(values)
    output = Path(values["output_dir"])
    lines = journal(output)
    assert 9 < len(lines) < STEPS
    assert caught.value.code == "student_degraded"
    metric = str(caught.value.key)
    assert metric.endswith(("invalid_byte_share", "reverse_kl_estimate"))
    assert lines[-1][metric] > lines[0][metric]
    assert lines[-1]["loss"] < lines[0]["loss"]
    sound, *_, last = sorted((output / "checkpoints").iterdir())
    assert Checkpoint.open(last).step == len(lines)
    assert Checkpoint.open(sound).step <= len(lines) - 6
    assert str(sound) in str(caught.value)
    assert str(last) in str(caught.value)

    with pytest.raises(DegradationError):
        run_here(values, resume_from_checkpoint=True)
    assert len(journal(output)) == len(lines) + 1


def test_a_run_may_continue_with_the_warning(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mopd_trainer.training.degradation"):
        run_here(values, stop_on_degradation=False, max_steps=20)
    lines = journal(Path(values["output_dir"]))
    assert len(lines) == 20
    warned = [record for record in caplog.records if record.name.endswith("degradation")]
    assert 1 <= len(warned) == len({record.message.split()[2] for record in warned})
