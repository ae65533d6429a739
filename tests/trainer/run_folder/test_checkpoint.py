"""Checkpoints: whole or not there, the newest found, and never taken for another run's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd_protocol.errors import ConfigError, DataError, ResumeError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.samples import Message, Prompt
from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import load_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_checkpoint
from mopd_trainer.run_folder.journal import JOURNAL
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
        identity=identity_of(config),
    )


def identity_of(config: RunConfig, question: str = "1 + 1 =") -> RunIdentity:
    messages = (Message(role="user", content=question),)
    return RunIdentity.of(config, [Prompt(index=0, messages=messages, teachers={"math": 1.0})])


def start_of(config: RunConfig) -> Checkpoint | None:
    return starting_checkpoint(config, identity_of(config))


def kept(config: RunConfig, *, done: int = 0) -> CheckpointManager:
    return CheckpointManager(config, identity_of(config), {"math": MANIFEST}, done=done)


def names(config: RunConfig) -> list[str]:
    return sorted(path.name for path in (config.output_dir / "checkpoints").iterdir())


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
        "model": "mopd_trainer.run_folder.checkpoint.Student.save",
        "optimizer": "mopd_trainer.run_folder.checkpoint.torch.save",
        "config": "mopd_trainer.run_folder.checkpoint.write_resolved",
    }[part]
    with monkeypatch.context() as patched:
        patched.setattr(target, full)
        for step in (4, 2):  # neither a new one nor in the place of an old one
            with pytest.raises(DataError, match=r"the checkpoint of step \d .*: no space left on"):
                save(config, step, student)
    assert everything_under(tmp_path) == before
    assert Checkpoint.open(config.output_dir / "checkpoints" / "step-00000002").step == 2


def test_the_newest_checkpoint_is_where_a_run_goes_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume_from_checkpoint=True)
    assert start_of(config) is None
    student = student_of()
    for step in (9, 100, 20):
        save(config, step, student)
    for leftover in (".step-00000200.1.part", ".step-00000100.77.old.part"):  # a kill's
        (config.output_dir / "checkpoints" / leftover).mkdir()
    found = start_of(config)
    assert found is not None
    assert found.step == 100
    kept(config, done=100)
    assert names(config) == ["step-00000009", "step-00000020", "step-00000100"]


def test_a_named_checkpoint_is_taken_and_a_wrong_name_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    student = student_of()
    folders = [save(config, step, student) for step in (1, 2)]
    named = config_of(tmp_path, resume_from_checkpoint=str(folders[0]))
    found = start_of(named)
    assert found is not None
    assert found.step == 1
    with pytest.raises(ConfigError, match="none holds no checkpoint: "):
        start_of(config_of(tmp_path, resume_from_checkpoint=str(tmp_path / "none")))


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert start_of(config) is None
    config.output_dir.mkdir()
    (config.output_dir / JOURNAL).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run; set resume_from_checkpoint=true"):
        start_of(config)


def test_checkpoints_without_a_journal_are_a_run_too(tmp_path: Path) -> None:
    """Beginning anew would remove them."""
    config = config_of(tmp_path)
    save(config, 3, student_of())
    with pytest.raises(ConfigError, match="already holds a run; set resume_from_checkpoint=true"):
        start_of(config)


def test_a_checkpoint_of_elsewhere_does_not_cost_the_later_ones_that_are_here(
    tmp_path: Path,
) -> None:
    student = student_of()
    elsewhere = save(config_of(tmp_path, output_dir=str(tmp_path / "other")), 2, student)
    config = config_of(tmp_path, resume_from_checkpoint=str(elsewhere))
    own = save(config, 2, student)
    assert start_of(config) is not None
    save(config, 7, student)
    with pytest.raises(ConfigError, match="holds step-00000007, which would be removed for"):
        start_of(config)
    assert start_of(config_of(tmp_path, resume_from_checkpoint=str(own))) is not None


def test_a_checkpoint_after_the_runs_last_step_is_refused(tmp_path: Path) -> None:
    changes = {"student": {"model": "tiny", "min_learning_rate_ratio": 1.0}}
    save(config_of(tmp_path, **changes), 3, student_of())
    shorter = config_of(tmp_path, resume_from_checkpoint=True, max_steps=2, **changes)
    with pytest.raises(ConfigError, match=r"max_steps is 2, but checkpoint .* is of step 3; raise"):
        start_of(shorter)
    as_long = config_of(tmp_path, resume_from_checkpoint=True, max_steps=3, **changes)
    assert start_of(as_long) is not None


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    wider = Student(tiny_models.llama(tokenizer("digit")), tokenizer("digit"), CPU)
    folder = save(config, 1, wider)
    student = student_of()
    optimizer = torch.optim.AdamW(student.model.parameters())
    with pytest.raises(DataError, match=r"step-00000001 does not fit student\.model: ") as told:
        Checkpoint.open(folder).restore(student, optimizer)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("part", "keep", "told"),
    [
        ("optimizer.pt", 100, "optimizer.pt has 100 bytes, expected "),
        ("model/model.safetensors", None, "model/model.safetensors is missing, expected "),
        ("state.json", 20, "step-00000020 holds no checkpoint: JSONDecodeError"),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, keep: int | None, told: str
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
    found = start_of(config)
    assert found is not None
    assert found.step == 10
    [line] = caplog.messages
    assert told in line
    assert line.endswith("; going on from step-00000010 instead")
    with pytest.raises(ConfigError, match=str(folders[1])):  # asked for by name, it is refused
        start_of(config_of(tmp_path, resume_from_checkpoint=str(folders[1])))
    damage(folders[0])
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints in .* is whole, the newest"):
        start_of(config)
    assert names(config) == ["step-00000010", "step-00000020"]  # looking changes nothing


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt"])
def test_tensors_that_a_disk_garbled_are_told(tmp_path: Path, name: str) -> None:
    """Their files are as long as they were, so only who reads them sees it."""
    student = student_of()
    folder = save(config_of(tmp_path), 1, student)
    (folder / name).write_bytes(b"x" * (folder / name).stat().st_size)
    with pytest.raises(DataError, match=r"is damaged: .*; name an earlier one") as told:
        Checkpoint.open(folder).restore(student, stepped(student))
    assert "\n" not in str(told.value)


def test_steps_that_are_done_again_have_no_checkpoint_yet(tmp_path: Path) -> None:
    """Or a run killed before it comes there would go on from what its journal has forgotten."""
    config = config_of(tmp_path, resume_from_checkpoint=True)
    student = student_of()
    for step in (1, 2, 3):
        save(config, step, student)
    kept(config, done=2)
    assert names(config) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("keep", "expected"), [(None, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])]
)
def test_the_newest_checkpoints_are_kept(
    tmp_path: Path, keep: int | None, expected: list[int]
) -> None:
    config = config_of(tmp_path, keep_checkpoints=keep)
    student, checkpoints = student_of(), kept(config)
    optimizer = stepped(student)
    for step in range(1, 5):
        checkpoints.save(step, student, optimizer)
    assert names(config) == [f"step-{step:08d}" for step in expected]


def test_what_a_kill_kept_from_going_goes_at_the_next_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, keep_checkpoints=1)
    student = student_of()
    for step in (1, 2):
        save(config, step, student)  # and killed before the older one went
    kept(config, done=2)
    assert names(config) == ["step-00000002"]


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 3)])
def test_the_best_checkpoint_is_kept_beside_the_newest(
    tmp_path: Path, mode: str, best: int
) -> None:
    """By the mean since the checkpoint before; a step that did not measure it does not count."""
    config = config_of(
        tmp_path, keep_checkpoints=1, best_checkpoint_metric="loss", best_checkpoint_mode=mode
    )
    student, checkpoints = student_of(), kept(config)
    optimizer = stepped(student)
    for step, losses in enumerate([[3.0], [9.0, 1.0, 1.0], [1.0, 9.0], []], start=1):
        for loss in [*losses, float("nan")]:
            checkpoints.observe({"loss": loss, "other": -100.0})
        checkpoints.save(step, student, optimizer)
        if step == 2:  # whatever process goes on
            checkpoints = kept(config, done=2)
    found = [Checkpoint.open(config.output_dir / "checkpoints" / name) for name in names(config)]
    # Means: 3, 11/3, 5, not measured.
    assert [checkpoint.step for checkpoint in found] == [best, 4]
    assert found[-1].metric is None


def test_the_best_by_one_metric_is_not_compared_with_another(tmp_path: Path) -> None:
    student = student_of()
    optimizer = stepped(student)
    first = config_of(tmp_path, keep_checkpoints=2, best_checkpoint_metric="loss")
    checkpoints = kept(first)
    for step, loss in enumerate([1.0, 2.0], start=1):
        checkpoints.observe({"loss": loss})
        checkpoints.save(step, student, optimizer)
    then = config_of(tmp_path, keep_checkpoints=1, best_checkpoint_metric="grad_norm")
    checkpoints = kept(then, done=2)
    for step, norm in enumerate([7.0, 8.0], start=3):
        checkpoints.observe({"grad_norm": norm})
        checkpoints.save(step, student, optimizer)
    assert names(then) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_that_does_not_name_its_metric_is_gone_on_from(tmp_path: Path) -> None:
    folder = save(config_of(tmp_path), 1, student_of())
    state = json.loads((folder / "state.json").read_text())
    del state["metric_name"]
    (folder / "state.json").write_text(json.dumps(state))
    assert Checkpoint.open(folder).metric_name is None


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "seed"),
    ({"student": {"learning_rate": 0.5}}, "student.learning_rate"),
    ({"rollout": {"prompts_per_step": 5}}, "rollout.prompts_per_step"),
    ({"max_steps": 7}, "max_steps"),
    ({"teachers": {"math": {"loss": {"type": "gold"}}}}, "teachers.math.loss.type"),
    ({"teachers": {"math": {"weight": 2.0}}}, "teachers.math.weight"),
]
HARMLESS: list[dict[str, Any]] = [
    {"exp_name": "other", "save_steps": 7, "logging_steps": 3, "keep_checkpoints": 9},
    {"student": {"model": "elsewhere", "tokens_per_micro_batch": 7, "device": "cuda"}},
    {"teachers": {"math": {"url": "http://elsewhere:1", "deadline_seconds": 7}}},
    {"data": {"prompts": "elsewhere.jsonl"}, "logging": {"tensorboard": False}},
    {"student": {"min_learning_rate_ratio": 1.0}, "max_steps": 9},
]


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with nested ones replaced."""
    found = dict(values)
    for key, value in changes.items():
        nested = isinstance(value, dict) and key in values
        found[key] = changed(values[key], value) if nested else value
    return found


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


@pytest.mark.parametrize("changes", HARMLESS, ids=[str(list(change)) for change in HARMLESS])
def test_what_decides_nothing_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = run_values(tmp_path, resume_from_checkpoint=True)
    if "max_steps" in changes:  # a learning rate that stays does not see the end
        values["student"]["min_learning_rate_ratio"] = 1.0
    save(RunConfig.model_validate(values), 1, student_of())
    assert start_of(RunConfig.model_validate(changed(values, changes)))


def test_a_checkpoint_of_other_data_or_teachers_is_refused(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = save(config, 1, student_of())
    other = Student(tiny_models.llama(tokenizer("sentencepiece")), tokenizer("sentencepiece"), CPU)
    with pytest.raises(DataError, match=r"does not fit student\.model: its tokenizer is "):
        Checkpoint.open(folder).restore(other, torch.optim.AdamW(other.model.parameters()))
