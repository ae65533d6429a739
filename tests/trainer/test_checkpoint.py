"""Checkpoints: whole or not there, the newest found, and never taken for another run's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.token_table import TokenRoles
from mopd_trainer.checkpoint import Checkpoint, save_checkpoint, starting_checkpoint
from mopd_trainer.config import RunConfig
from mopd_trainer.journal import JOURNAL
from mopd_trainer.run_file import load_run
from mopd_trainer.student import Student
from tests import tiny_models
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, student_of, tokenizer

MANIFEST = Manifest(
    service="math",
    model="tiny",
    revision="r1",
    engine="script",
    engine_version="1",
    dtype="float32",
    logit_width=448,
    tokenizer_fingerprint="f" * 32,
    tokenizer_size=420,
    roles=TokenRoles(eos=0),
    chat_template_hash=None,
    max_model_len=256,
    max_top_k=64,
    features=Features(candidate_ids=True, temperature=True, messages=True),
)


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(run_values(folder, **changes))


def stepped(student: Student, seed: int = 0) -> torch.optim.Optimizer:
    """An optimizer with moments, after one step on made-up gradients."""
    optimizer = torch.optim.AdamW(student.model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in student.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


def save(config: RunConfig, step: int, student: Student, optimizer: Any = None) -> Path:
    return save_checkpoint(
        config,
        step=step,
        student=student,
        optimizer=optimizer or stepped(student),
        manifests={"math": MANIFEST},
    )


def everything_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_restored_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    student = student_of()
    optimizer = stepped(student)
    folder = save(config, 3, student, optimizer)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.step == 3
    assert checkpoint.manifest_ids == {"math": MANIFEST.manifest_id}
    assert load_run(folder / "config.yaml") == config

    other = student_of(seed=1)
    resumed = torch.optim.AdamW(other.model.parameters(), lr=1e-3)
    checkpoint.restore(other, resumed)
    for chosen, its in ((student, optimizer), (other, resumed)):
        for parameter in chosen.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        its.step()
    for ours, theirs in zip(other.model.parameters(), student.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("part", ["model", "optimizer", "config"])
def test_a_checkpoint_that_could_not_be_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    config = config_of(tmp_path)
    student = student_of()
    save(config, 2, student)
    before = everything_under(tmp_path)

    def full(*arguments: object, **settings: object) -> None:
        raise OSError("no space left on device")

    target = {
        "model": "mopd_trainer.checkpoint.Student.save",
        "optimizer": "mopd_trainer.checkpoint.torch.save",
        "config": "mopd_trainer.checkpoint.write_resolved",
    }[part]
    with monkeypatch.context() as patched:
        patched.setattr(target, full)
        for step in (4, 2):  # neither a new one nor in the place of an old one
            with pytest.raises(OSError, match="no space left"):
                save(config, step, student)
    assert everything_under(tmp_path) == before
    assert Checkpoint.open(config.output_dir / "checkpoints" / "step-00000002").step == 2


def test_the_newest_checkpoint_is_where_a_run_goes_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    assert starting_checkpoint(config) is None
    student = student_of()
    for step in (9, 100, 20):
        save(config, step, student)
    (config.output_dir / "checkpoints" / ".step-00000200.1.part").mkdir()  # a kill's leftover
    found = starting_checkpoint(config)
    assert found is not None
    assert found.step == 100


def test_a_named_checkpoint_is_taken_and_a_wrong_name_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    student = student_of()
    folders = [save(config, step, student) for step in (1, 2)]
    named = config_of(tmp_path, resume_from_checkpoint=str(folders[0]))
    found = starting_checkpoint(named)
    assert found is not None
    assert found.step == 1
    with pytest.raises(ConfigError, match="none holds no checkpoint: "):
        starting_checkpoint(config_of(tmp_path, resume_from_checkpoint=str(tmp_path / "none")))


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert starting_checkpoint(config) is None
    config.output_dir.mkdir()
    (config.output_dir / JOURNAL).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run; set resume_from_checkpoint=true"):
        starting_checkpoint(config)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wider = Student(tiny_models.llama(tokenizer("sentencepiece")), tokenizer("sentencepiece"), CPU)
    folder = save(config, 1, wider)
    student = student_of()
    optimizer = torch.optim.AdamW(student.model.parameters())
    with pytest.raises(DataError, match=r"step-00000001 does not fit student\.model: ") as told:
        Checkpoint.open(folder).restore(student, optimizer)
    assert "\n" not in str(told.value)
