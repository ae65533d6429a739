"""Self-teachers: initial, current, averaged and copied weights; zero losses; resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from mopd_protocol.errors import ConfigError, ResumeError, TeacherMismatchError
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import pack
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.student.attention import Packing
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.model import LocalTask, ScoreOptions
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.teachers.local.self_model import SelfModel
from tests import tiny_models
from tests.reference.averages import copied, moving_average
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import CPU, ids_of, model_of, rollout, student_of, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_cut_off, run_here

KINDS: dict[str, dict[str, Any]] = {
    "start": {},
    "live": {"weights": "live"},
    "average": {"weights": "average", "rate": 0.25},
    "copy": {"weights": "copy", "every": 2},
}


def config_of(**settings: Any) -> TeacherConfig:
    return TeacherConfig.model_validate({"kind": "self", **settings})


@pytest.fixture(scope="module")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = model_of("qwen", 5, sharpness=4.0)
    return tiny_models.save(model, tokenizer("digit"), tmp_path_factory.mktemp("student"))


@pytest.fixture
def values(tmp_path: Path, student_folder: Path) -> dict[str, Any]:
    lines = [{**line, "answer": "7"} for line in prompt_lines(6, ["own"])]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path, max_steps=4, teachers={"own": {"kind": "self", "top_k": 8}})
    values["student"]["model"] = str(student_folder)
    values["data"]["answer_key"] = "answer"
    values["logging"] = {"tensorboard": False}
    values["stop_on_degradation"] = False
    return values


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_a_live_teacher_has_the_rows_of_training(packing: Packing) -> None:
    """Bit for bit, for examples of unequal lengths, of which the rounding depends on the layout."""
    student = Student(model_of("qwen", sharpness=4.0), tokenizer("digit"), CPU, packing=packing)
    rollouts = [rollout("digit", ids_of("digit", "7 + 4 = " * n), index=n) for n in range(1, 9)]
    tasks = [LocalTask(each.prompt_token_ids, each.completion.token_ids) for each in rollouts]
    own = SelfModel(config_of(weights="live"), student, tokens_per_batch=300)
    options = ScoreOptions(top_k=1, temperature=1.0, hidden=True)
    scores = own.score(tasks, options)
    examples = [TrainingExample(replace(each, sampled_logprobs=None), ()) for each in rollouts]
    batches = pack(examples, tokens_per_micro_batch=300, packed=student.packs)
    compared = 0
    for batch in batches:
        with torch.no_grad():
            rows = student.completion_rows(batch).split(list(batch.example_slots))
        for index, expected in zip(batch.examples, rows, strict=True):
            hidden = scores[index].hidden
            assert hidden is not None
            assert torch.equal(hidden, expected)
            compared += 1
    assert compared == len(rollouts)


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_an_average_is_the_reference_to_float32_rounding(rate: float) -> None:
    """A rounding of at most half a unit in each step, which the average itself forgets."""
    student = student_of()
    own = SelfModel(config_of(weights="average", rate=rate), student, tokens_per_batch=64)
    name, parameter = next(iter(student.trained().items()))
    start = parameter.detach().flatten()[:20].clone()
    history: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 41):
        with torch.no_grad():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        history.append(parameter.detach().flatten()[:20].clone())
        own.update(step)
    averaged = own.state()[name].flatten()[:20].tolist()
    for index, value in enumerate(averaged):
        weights = [each[index].item() for each in history]
        expected = moving_average(start[index].item(), weights, rate)
        largest = max(map(abs, [*weights, start[index].item()]))
        assert abs(value - expected) <= 4 * torch.finfo(torch.float32).eps * largest


def test_an_average_of_half_precision_weights_is_kept_in_float32() -> None:
    """Steps below the precision of the weights add up."""
    student = student_of()
    student.model.to(torch.bfloat16)
    own = SelfModel(config_of(weights="average", rate=0.001), student, tokens_per_batch=64)
    name, parameter = next(iter(student.trained().items()))
    with torch.no_grad():
        parameter.fill_(1.0)
    own.load_state({each: torch.ones_like(value) for each, value in own.state().items()})
    with torch.no_grad():
        parameter.fill_(2.0)
    for step in range(1, 101):
        own.update(step)
    assert own.state()[name].dtype == torch.float32
    expected = moving_average(1.0, [2.0] * 100, 0.001)
    assert own.state()[name].flatten()[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_copy_is_taken_every_few_steps() -> None:
    student = student_of()
    own = SelfModel(config_of(weights="copy", every=3), student, tokens_per_batch=64)
    name, parameter = next(iter(student.trained().items()))
    start, history = parameter.flatten()[0].item(), list[float]()
    for step in range(1, 9):
        with torch.no_grad():
            parameter.add_(1.0)
        history.append(parameter.flatten()[0].item())
        own.update(step)
        assert float(own.state()[name].flatten()[0]) == copied(start, history, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, values: dict[str, Any], kind: str
) -> None:
    """Cut off in the last step, after one checkpoint of three steps."""
    values["teachers"]["own"] |= {**KINDS[kind], "append_key": "answer"}
    whole, _ = run_here(values, save_steps=3)
    values["output_dir"] = str(tmp_path / "cut")
    run_cut_off(values, in_step=4, save_steps=3)
    resumed, _ = run_here(values, save_steps=3, resume_from_checkpoint=True)
    assert_same_weights(whole, resumed)
    files = [tmp_path / name / "checkpoints" / "step-00000004" for name in ("run", "cut")]
    for folder in files:
        assert (folder / "teachers.safetensors").is_file() == (kind in ("average", "copy"))
    if kind in ("average", "copy"):
        first, second = (load_file(folder / "teachers.safetensors") for folder in files)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    lines, others = (journal(tmp_path / name) for name in ("run", "cut"))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    assert lines[-1]["loss"] > 1e-4


def test_teachers_of_all_kinds_differ_once_the_student_has_moved(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """Equal losses in the first step, and different ones in the third."""
    losses: dict[str, list[float]] = {}
    for kind, settings in KINDS.items():
        own = {**values["teachers"]["own"], **settings, "append_key": "answer"}
        folder = tmp_path / kind
        run_here(values, output_dir=str(folder), max_steps=3, teachers={"own": own})
        losses[kind] = [line["loss"] for line in journal(folder)]
    assert len({each[0] for each in losses.values()}) == 1
    assert len({each[2] for each in losses.values()}) == len(KINDS)


@pytest.mark.parametrize("loss", ["auto", "topk_kl"])
def test_a_live_teacher_without_an_own_prompt_has_no_loss(
    tmp_path: Path, values: dict[str, Any], loss: str
) -> None:
    own = {"kind": "self", "weights": "live", "support": "full", "top_k": 8, "loss": loss}
    folder, _ = run_here(values, teachers={"own": own})
    lines = journal(tmp_path / "run")
    assert [line["loss"] for line in lines] == [0.0] * 4
    assert [line["grad_norm"] for line in lines] == [pytest.approx(0.0, abs=1e-6)] * 4
    truncated = own | {"support": "teacher_topk"}
    run_here(values, teachers={"own": truncated}, output_dir=str(tmp_path / "top"))
    assert [line["loss"] for line in journal(tmp_path / "top")] == [
        pytest.approx(0.0, abs=1e-6)
    ] * 4
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"weights": "copy"}, "every"),
        ({"weights": "average", "every": 2}, "every"),
        ({"rate": 0.1}, "rate"),
        ({"placement": "url", "url": "http://a"}, "placement"),
        ({"kind": "mopd", "url": "http://a", "weights": "live"}, "weights"),
        ({"tokenizer": "t"}, "tokenizer"),
        ({"support": "full", "loss": "ctkd"}, "support"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=f"Value error, {key}: "):
        config_of(**settings)


def test_a_self_teacher_needs_the_students_model_and_one_rank(values: dict[str, Any]) -> None:
    config = RunConfig.model_validate(values)
    own, student = config.teachers["own"], config.student
    assert (own.model, own.dtype, config.rollout.scoring) == (
        student.model,
        student.dtype,
        "after_rollout",
    )
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    other = {**values, "teachers": {"own": {"kind": "self", "model": "another"}}}
    ranks = {**values, "resources": {"student": 2}}
    ranks["student"] = {**values["student"], "sharding": "ddp"}
    for invalid, key in ((other, "teachers.own.model"), (ranks, "teachers.own.kind")):
        with pytest.raises(ValidationError, match=f"Value error, {key}: "):
            RunConfig.model_validate(invalid)

    two = Ranks()
    two.size = 2
    with pytest.raises(ConfigError) as caught:
        LocalTeachers({"own": own}, {}, device=CPU, tokens_per_batch=64, ranks=two)
    assert caught.value.key == "teachers.own.kind"


def test_resuming_with_other_self_teachers_is_rejected(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """Other weights are another manifest; missing ones are an error, not a fresh copy."""
    values["teachers"]["own"] |= KINDS["average"]
    run_here(values, max_steps=1, save_steps=1)
    again = {"resume_from_checkpoint": True, "max_steps": 2, "accept_changed_settings": True}
    changed = {"own": {"kind": "self", "top_k": 8, **KINDS["copy"]}}
    with pytest.raises(TeacherMismatchError):
        run_here(values, teachers=changed, **again)
    added = {"more": {"kind": "self", "top_k": 8, **KINDS["copy"]}, **values["teachers"]}
    values["data"]["default_teacher"] = "own"
    with pytest.raises(ResumeError) as caught:
        run_here(values, teachers=added, **again)
    assert caught.value.key == "teachers"


def test_a_lora_student_is_its_own_base_model(tmp_path: Path, values: dict[str, Any]) -> None:
    """Only adapters are copied; those of the start are the base model."""
    pytest.importorskip("peft")
    values["student"]["lora"] = {"rank": 2}
    config = RunConfig.model_validate(values)
    student = Student.load(config.student)
    own = SelfModel(config.teachers["own"], student, tokens_per_batch=64)
    frozen = {id(p) for p in student.model.parameters() if not p.requires_grad}
    copies = {id(p) for p in own._scored.model.parameters() if not p.requires_grad}
    assert copies == frozen
    average = SelfModel(config_of(weights="average"), student, tokens_per_batch=64)
    assert all("lora_" in name for name in average.state())
    values["teachers"]["own"] |= {**KINDS["average"], "append_key": "answer"}
    whole, _ = run_here(values, max_steps=2, save_steps=1)
    values["output_dir"] = str(tmp_path / "cut")
    run_cut_off(values, in_step=2, save_steps=1, max_steps=2)
    resumed, _ = run_here(values, save_steps=1, max_steps=2, resume_from_checkpoint=True)
    adapters, again = (load_file(each / "adapter_model.safetensors") for each in (whole, resumed))
    assert adapters.keys() == again.keys()
    assert all(torch.equal(adapters[name], again[name]) for name in adapters)
