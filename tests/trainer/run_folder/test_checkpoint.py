"""Checkpoints: complete or missing, discovery of the latest, and rejection of other runs'."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_protocol.errors import CheckpointError, DiskError, ResumeError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.samples import Message, Prompt
from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import load_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_checkpoint
from mopd_trainer.run_folder.files import JOURNAL
from mopd_trainer.run_folder.retention import CheckpointManager, starting_checkpoint
from mopd_trainer.student.student import Student
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
    return RunConfig.model_validate(run_values(folder, **{"max_steps": 1_000, **changes}))


def stepped(student: Student, seed: int = 0) -> torch.optim.Optimizer:
    """Return an optimizer with moments, after one step on random gradients."""
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
        identity=identity_of(config),
    )


def identity_of(config: RunConfig, content: str = "1 + 1 =") -> RunIdentity:
    messages = (Message(role="user", content=content),)
    return RunIdentity.of(config, [Prompt(index=0, messages=messages, teachers={"math": 1.0})])


def start_of(config: RunConfig) -> Checkpoint | None:
    return starting_checkpoint(config, identity_of(config))


def manager(config: RunConfig, *, done: int = 0) -> CheckpointManager:
    return CheckpointManager(config, identity_of(config), {"math": MANIFEST}, done=done)


def names(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (config.output_dir / "checkpoints").iterdir())


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_restored_run_continues_identically(tmp_path: Path) -> None:
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
    for model, adamw in ((student.model, optimizer), (other.model, resumed)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        adamw.step()
    for first, second in zip(other.model.parameters(), student.model.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("part", ["model", "optimizer", "config"])
def test_failed_save_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    config = config_of(tmp_path)
    student = student_of()
    save(config, 2, student)
    before = files_under(tmp_path)

    def full(*arguments: object, **settings: object) -> None:
        raise OSError("no space left on device")

    target = {
        "model": "mopd_trainer.run_folder.checkpoint.Student.save",
        "optimizer": "mopd_trainer.run_folder.checkpoint.torch.save",
        "config": "mopd_trainer.run_folder.checkpoint.write_resolved",
    }[part]
    with monkeypatch.context() as patched:
        patched.setattr(target, full)
        for step in (4, 2):  # a new checkpoint, and one that replaces an old one
            with pytest.raises(DiskError) as caught:
                save(config, step, student)
            folder = config.output_dir / "checkpoints" / f"step-{step:08d}"
            assert caught.value.key == str(folder)
    assert files_under(tmp_path) == before
    assert Checkpoint.open(config.output_dir / "checkpoints" / "step-00000002").step == 2


def test_run_resumes_from_the_latest_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    assert start_of(config) is None
    student = student_of()
    for step in (9, 100, 20):
        save(config, step, student)
    for leftover in (".step-00000200.1.part", ".step-00000100.77.old.part"):  # of a killed process
        (config.output_dir / "checkpoints" / leftover).mkdir()
    checkpoint = start_of(config)
    assert checkpoint is not None
    assert checkpoint.step == 100
    manager(config, done=100)
    assert names(config) == ["step-00000020", "step-00000100"]


def test_resume_from_a_path(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    student = student_of()
    folders = [save(config, step, student) for step in (1, 2)]
    named = config_of(tmp_path, resume_from_checkpoint=str(folders[0]))
    checkpoint = start_of(named)
    assert checkpoint is not None
    assert checkpoint.step == 1
    with pytest.raises(CheckpointError) as caught:
        start_of(config_of(tmp_path, resume_from_checkpoint=str(tmp_path / "none")))
    assert caught.value.key == str(tmp_path / "none")


@pytest.mark.parametrize("existing", ["journal", "checkpoint"])
def test_folder_with_a_run_is_not_started_again(tmp_path: Path, existing: str) -> None:
    config = config_of(tmp_path)
    assert start_of(config) is None
    config.output_dir.mkdir()
    if existing == "journal":
        (config.output_dir / JOURNAL).write_text('{"step": 1}\n')
    else:
        save(config, 3, student_of())
    with pytest.raises(ResumeError) as caught:
        start_of(config)
    assert caught.value.key == "output_dir"


def test_resuming_from_another_folder_removes_no_later_checkpoints(tmp_path: Path) -> None:
    student = student_of()
    elsewhere = save(config_of(tmp_path, output_dir=str(tmp_path / "other")), 2, student)
    config = config_of(tmp_path, resume_from_checkpoint=str(elsewhere))
    own = save(config, 2, student)
    assert start_of(config) is not None
    save(config, 7, student)
    with pytest.raises(ResumeError, match="step-00000007") as caught:
        start_of(config)
    assert caught.value.key == "output_dir"
    assert start_of(config_of(tmp_path, resume_from_checkpoint=str(own))) is not None


def test_checkpoint_after_max_steps_is_rejected(tmp_path: Path) -> None:
    changes = {"student": {"model": "tiny", "min_learning_rate_ratio": 1.0}}
    save(config_of(tmp_path, **changes), 3, student_of())
    shorter = config_of(tmp_path, resume_from_checkpoint=True, max_steps=2, **changes)
    with pytest.raises(ResumeError) as caught:
        start_of(shorter)
    assert caught.value.key == "max_steps"
    as_long = config_of(tmp_path, resume_from_checkpoint=True, max_steps=3, **changes)
    assert start_of(as_long) is not None


@pytest.mark.parametrize(
    ("max_steps", "rates"), [(20, ["0.000854", "0.0005"]), (8, ["0.000309", "0.0005"]), (10, [])]
)
def test_another_length_is_reported_with_its_learning_rates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_steps: int, rates: list[str]
) -> None:
    save(config_of(tmp_path, max_steps=10), 5, student_of())
    assert start_of(config_of(tmp_path, resume_from_checkpoint=True, max_steps=max_steps))
    assert [rate for record in caplog.messages for rate in re.findall(r"0\.0\d+", record)] == rates


def test_a_constant_learning_rate_does_not_depend_on_the_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    student = {"model": "tiny", "min_learning_rate_ratio": 1.0}
    save(config_of(tmp_path, max_steps=10, student=student), 10, student_of())
    longer = config_of(tmp_path, resume_from_checkpoint=True, max_steps=20, student=student)
    assert start_of(longer)
    assert caplog.messages == []


def test_resuming_without_a_checkpoint_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    assert start_of(config) is None
    assert len(caplog.messages) == 1
    assert str(config.output_dir) in caplog.text


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wider = Student(tiny_models.llama(tokenizer("digit")), tokenizer("digit"), CPU)
    folder = save(config, 1, wider)
    student = student_of()
    optimizer = torch.optim.AdamW(student.model.parameters())
    with pytest.raises(ResumeError) as caught:
        Checkpoint.open(folder).restore(student, optimizer)
    assert caught.value.key == "student.model"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "keep", "logged"),
    [
        ("optimizer.pt", 100, "optimizer.pt (found 100 bytes, expected "),
        ("model/model.safetensors", None, "model/model.safetensors (not found, expected "),
        ("state.json", 20, "JSONDecodeError"),
    ],
)
def test_damaged_latest_checkpoint_falls_back_to_the_previous_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, keep: int | None, logged: str
) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    student = student_of()
    folders = [save(config, step, student) for step in (10, 20)]

    def damage(folder: Path) -> None:
        content = (folder / part).read_bytes()
        (folder / part).unlink()
        if keep is not None:
            (folder / part).write_bytes(content[:keep])

    damage(folders[1])
    checkpoint = start_of(config)
    assert checkpoint is not None
    assert checkpoint.step == 10
    [message] = caplog.messages
    assert logged in message
    assert "step-00000010" in message
    with pytest.raises(CheckpointError, match=str(folders[1])):  # no fallback from a path
        start_of(config_of(tmp_path, resume_from_checkpoint=str(folders[1])))
    damage(folders[0])
    with pytest.raises(CheckpointError, match="among 2 "):
        start_of(config)
    assert names(config) == ["step-00000010", "step-00000020"]  # discovery changes nothing


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt"])
def test_flipped_bit_is_reported(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    folders = [save(config, step, student_of()) for step in (10, 20)]
    path = folders[1] / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        start_of(config_of(tmp_path, resume_from_checkpoint=str(folders[1])))
    assert caught.value.key == str(path)
    checkpoint = start_of(config)
    assert checkpoint is not None
    assert checkpoint.step == 10


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt"])
def test_damaged_tensors_are_reported(tmp_path: Path, name: str) -> None:
    """The files have the same size, so the damage shows only on loading."""
    student = student_of()
    folder = save(config_of(tmp_path), 1, student)
    (folder / name).write_bytes(b"x" * (folder / name).stat().st_size)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).restore(student, stepped(student))
    assert caught.value.key == str(folder)
    assert "\n" not in str(caught.value)


def test_checkpoints_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    """A run killed before it reaches them would resume after steps missing in the journal."""
    config = config_of(tmp_path, resume_from_checkpoint=True)
    student = student_of()
    for step in (1, 2, 3):
        save(config, step, student)
    manager(config, done=2)
    assert names(config) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("keep", "expected"), [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])]
)
def test_latest_checkpoints_are_kept(tmp_path: Path, keep: int | None, expected: list[int]) -> None:
    config = config_of(tmp_path, keep_checkpoints=keep)
    student, checkpoints = student_of(), manager(config)
    optimizer = stepped(student)
    for step in range(1, 5):
        checkpoints.save(step, student, optimizer)
    assert names(config) == [f"step-{step:08d}" for step in expected]


def test_interrupted_removal_is_finished_at_the_next_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, keep_checkpoints=1)
    student = student_of()
    for step in (1, 2):
        save(config, step, student)  # killed before the older one was removed
    manager(config, done=2)
    assert names(config) == ["step-00000002"]


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 3)])
def test_best_checkpoint_is_kept_in_addition(tmp_path: Path, mode: str, best: int) -> None:
    """By the mean since the previous checkpoint, over the steps that measured the metric."""
    config = config_of(
        tmp_path, keep_checkpoints=1, best_checkpoint_metric="loss", best_checkpoint_mode=mode
    )
    student, checkpoints = student_of(), manager(config)
    optimizer = stepped(student)
    for step, losses in enumerate([[3.0], [9.0, 1.0, 1.0], [1.0, 9.0], []], start=1):
        for loss in [*losses, float("nan")]:
            checkpoints.observe({"loss": loss, "other": -100.0})
        checkpoints.save(step, student, optimizer)
        if step == 2:  # resumed in another process
            checkpoints = manager(config, done=2)
    folder = config.output_dir / "checkpoints"
    saved = [Checkpoint.open(folder / name) for name in names(config)]
    # Means: 3, 11/3, 5, not measured.
    assert [checkpoint.step for checkpoint in saved] == [best, 4]
    assert saved[-1].metric is None


def test_values_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    student = student_of()
    optimizer = stepped(student)
    first = config_of(tmp_path, keep_checkpoints=2, best_checkpoint_metric="loss")
    checkpoints = manager(first)
    for step, loss in enumerate([1.0, 2.0], start=1):
        checkpoints.observe({"loss": loss})
        checkpoints.save(step, student, optimizer)
    second = config_of(tmp_path, keep_checkpoints=1, best_checkpoint_metric="grad_norm")
    checkpoints = manager(second, done=2)
    for step, norm in enumerate([7.0, 8.0], start=3):
        checkpoints.observe({"grad_norm": norm})
        checkpoints.save(step, student, optimizer)
    assert names(second) == ["step-00000003", "step-00000004"]


def test_checkpoint_without_the_name_of_its_metric_is_loaded(tmp_path: Path) -> None:
    folder = save(config_of(tmp_path), 1, student_of())
    state = json.loads((folder / "state.json").read_text())
    del state["metric_name"]
    (folder / "state.json").write_text(json.dumps(state))
    assert Checkpoint.open(folder).metric_name is None


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "seed"),
    ({"student": {"learning_rate": 0.5}}, "student.learning_rate"),
    ({"rollout": {"prompts_per_step": 5}}, "rollout.prompts_per_step"),
    ({"teachers": {"math": {"loss": {"type": "gold"}}}}, "teachers.math.loss.type"),
    ({"teachers": {"math": {"weight": 2.0}}}, "teachers.math.weight"),
]
INCIDENTAL: list[dict[str, Any]] = [
    {"exp_name": "other", "save_steps": 7, "logging_steps": 3, "keep_checkpoints": 9},
    {"student": {"model": "elsewhere", "tokens_per_micro_batch": 7, "device": "cuda"}},
    {"teachers": {"math": {"url": "http://elsewhere:1", "deadline_seconds": 7}}},
    {"data": {"prompts": "elsewhere.jsonl"}, "logging": {"tensorboard": False}},
    {"max_steps": 9},
]


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the values with nested changes."""
    merged = dict(values)
    for key, value in changes.items():
        nested = isinstance(value, dict) and key in values
        merged[key] = changed(values[key], value) if nested else value
    return merged


@pytest.mark.parametrize(("changes", "key"), CHANGES, ids=[key for _, key in CHANGES])
def test_checkpoint_with_other_settings_is_rejected_unless_accepted(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    values = run_values(tmp_path, resume_from_checkpoint=True)
    save(RunConfig.model_validate(values), 1, student_of())
    other = changed(values, changes)
    with pytest.raises(ResumeError) as caught:
        start_of(RunConfig.model_validate(other))
    assert caught.value.key == key
    assert start_of(RunConfig.model_validate({**other, "accept_changed_settings": True}))


@pytest.mark.parametrize("changes", INCIDENTAL, ids=[str(list(change)) for change in INCIDENTAL])
def test_incidental_settings_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = run_values(tmp_path, resume_from_checkpoint=True)
    save(RunConfig.model_validate(values), 1, student_of())
    assert start_of(RunConfig.model_validate(changed(values, changes)))


def test_checkpoint_with_other_data_or_teachers_is_rejected(tmp_path: Path) -> None:
    values = run_values(tmp_path, resume_from_checkpoint=True)
    config = RunConfig.model_validate(values)
    save(config, 1, student_of())
    with pytest.raises(ResumeError) as caught:
        starting_checkpoint(config, identity_of(config, "2 + 2 ="))
    assert caught.value.key == "data"
    del values["teachers"]["code"]
    with pytest.raises(ResumeError) as caught:
        start_of(RunConfig.model_validate(values))
    assert caught.value.key == "teachers.code"


def test_checkpoint_with_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = save(config, 1, student_of())
    other = Student(tiny_models.llama(tokenizer("sentencepiece")), tokenizer("sentencepiece"), CPU)
    with pytest.raises(ResumeError) as caught:
        Checkpoint.open(folder).restore(other, torch.optim.AdamW(other.model.parameters()))
    assert caught.value.key == "student.model"
