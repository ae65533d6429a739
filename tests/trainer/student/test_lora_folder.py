"""LoRA students on disk: adapters only, for any loader of adapters, and merged into a model."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mopd_protocol.errors import ConfigError, ResumeError
from mopd_protocol.samples import Message, Prompt
from mopd_trainer.cli.main import main
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.loading import write_resolved
from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_checkpoint, save_student
from mopd_trainer.run_folder.retention import starting_checkpoint
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests.trainer.lora_students import LORA, base_in, learner_for, moved, step
from tests.trainer.runs import run_values, write_lines
from tests.trainer.students import model_of
from tests.trainer.whole_runs import run_here

_WEIGHTS = "adapter_model.safetensors"
IDS = torch.tensor([[5, 6, 7, 40, 9, 77]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_in(tmp_path / "student")


def config_of(folder: Path, lora: dict[str, Any] | None = LORA, **student: Any) -> RunConfig:
    """A run whose model and output are in the folder."""
    values = run_values(folder)
    values["student"] |= {"learning_rate": 1e-2, "lora": lora, **student}
    return RunConfig.model_validate(values)


def identity_of(config: RunConfig) -> RunIdentity:
    messages = (Message(role="user", content="1 + 1 ="),)
    return RunIdentity.of(config, [Prompt(index=0, messages=messages, teachers={"math": 1.0})])


def checkpointed(config: RunConfig, student: Student, learner: Learner, done: int) -> Path:
    return save_checkpoint(
        config,
        step=done,
        student=student,
        optimizer=learner.optimizer,
        manifests={},
        identity=identity_of(config),
    )


def begun(config: RunConfig) -> tuple[Student, Learner]:
    student = Student.load(config.student)
    return student, learner_for(student, config.student)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(IDS).logits


def test_a_checkpoint_contains_adapters_and_resumes_bit_for_bit(tmp_path: Path, base: Path) -> None:
    config = config_of(tmp_path, {**LORA, "dropout": 0.2})
    student, learner = begun(config)
    step(learner, 0)
    step(learner, 1)
    folder = checkpointed(config, student, learner, 2)
    stored = load_file(folder / "model" / _WEIGHTS)
    assert len(stored) == len(student.trained()) == 28
    assert not list((folder / "model").glob("model*"))
    resumed, resumed_learner = begun(config)
    Checkpoint.open(folder).restore(resumed, resumed_learner.optimizer)
    assert step(resumed_learner, 2) == step(learner, 2)
    for name, parameter in student.trained().items():
        assert torch.equal(resumed.trained()[name], parameter), name


def test_peft_and_transformers_load_the_folder(tmp_path: Path, base: Path) -> None:
    student = moved(Student.load(config_of(tmp_path).student))
    folder = save_student(student, tmp_path / "final")
    expected = logits(student.model)
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(plain), expected, atol=1e-2)
    for loaded in (
        AutoModelForCausalLM.from_pretrained(folder),
        PeftModel.from_pretrained(plain, str(folder)),
    ):
        torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-6)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (4, 8)
    assert adapter_config["base_model_name_or_path"] == str(base)


def test_an_adapter_folder_is_not_a_student(tmp_path: Path, base: Path) -> None:
    config = config_of(tmp_path).student
    folder = save_student(Student.load(config), tmp_path / "final")
    for read in (Student.load, StudentIdentity.read):
        with pytest.raises(ConfigError, match="adapters but no model"):
            read(config.model_copy(update={"model": str(folder)}))


def test_a_run_and_its_check_print_the_trained_parameters(tmp_path: Path, base: Path) -> None:
    line = {"prompt": "3 + 4 =", "answer": "7"}
    write_lines(tmp_path / "prompts.jsonl", [line] * 4)
    values = config_of(tmp_path).model_dump(mode="json")
    values["data"] |= {"source": "answers", "answer_key": "answer"}
    values["student"]["distill_loss_weight"] = 0
    values["teachers"] = {}
    output = StringIO()
    asyncio.run(check_run(RunConfig.model_validate(values), Console(file=output, width=400)))
    folder, printed = run_here(values)
    trained = sum(value.numel() for value in load_file(folder / _WEIGHTS).values())
    whole = trained + sum(p.numel() for p in model_of("qwen").parameters())
    for text in (output.getvalue(), printed):
        assert f"LoRA of rank 4 trains {trained / 1e6:,.2f} M ({trained / whole:.2%}), " in text


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_a_merged_student_has_the_logits_of_its_adapters(
    tmp_path: Path, base: Path, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merge a finished run or one of its checkpoints, also from half-precision weights."""
    GenerationConfig(temperature=0.6, do_sample=True).save_pretrained(base)
    config = config_of(tmp_path, dtype=kept)
    student, learner = begun(config)
    moved(student)
    checkpoint = checkpointed(config, student, learner, 1)
    save_student(student, config.output_dir / "final")
    write_resolved(config, config.output_dir / "config.yaml")
    for run in (config.output_dir, checkpoint):
        merged = tmp_path / f"merged-{run.name}"
        main(["merge", str(run), str(merged)])
        assert capsys.readouterr().out == f"saved the model to {merged}\n"
        model: Any = AutoModelForCausalLM.from_pretrained(merged)
        assert model.dtype == torch.float32
        assert model.generation_config.temperature == 0.6
        plain: Any = AutoModelForCausalLM.from_pretrained(base)
        expected = logits(PeftModel.from_pretrained(plain, str(config.output_dir / "final")))
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
        assert AutoTokenizer.from_pretrained(merged).chat_template
        assert model.state_dict().keys() == model_of("qwen").state_dict().keys()


def test_weights_are_saved_in_the_configured_precision(tmp_path: Path, base: Path) -> None:
    config = config_of(tmp_path)
    save_student(moved(Student.load(config.student)), config.output_dir / "final")
    write_resolved(config, config.output_dir / "config.yaml")
    for dtype in ("float32", "bfloat16"):
        main(["merge", str(config.output_dir), str(tmp_path / dtype), "--dtype", dtype])
    whole, half = (load_file(tmp_path / d / "model.safetensors") for d in ("float32", "bfloat16"))
    assert whole.keys() == half.keys()
    for name, value in whole.items():
        assert torch.equal(half[name], value.bfloat16()), name


def test_what_cannot_be_merged_is_refused(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: Path) -> str:
        with pytest.raises(SystemExit):
            main(["merge", *map(str, arguments)])
        return capsys.readouterr().err

    config = config_of(tmp_path)
    run, output = config.output_dir, tmp_path / "merged"
    write_resolved(config, run / "config.yaml")
    assert refusal(run, output).startswith(f"mopd: {run}: no finished student")
    save_student(moved(Student.load(config.student)), run / "final")
    assert refusal(run / "final", output).startswith(f"mopd: {run / 'final'}: config.yaml")
    assert refusal(run, base).startswith(f"mopd: {base}: already exists")
    base_in(base, seed=1)
    assert refusal(run, output).startswith("mopd: student.model: ")
    write_resolved(config_of(tmp_path, None), run / "config.yaml")
    assert refusal(run, output).startswith(f"mopd: {run}: the run has no student.lora")
    assert not output.exists()


@pytest.mark.parametrize(
    ("was", "now", "reason"),
    [
        (LORA, {**LORA, "rank": 8}, r"student\.lora\.rank was 4, is 8"),
        (LORA, {**LORA, "alpha": 4}, r"student\.lora\.alpha was 8, is 4"),
        (
            LORA,
            {**LORA, "target_modules": ["q_proj"]},
            r"student\.lora\.target_modules was 'all-linear', is \['q",
        ),
        (None, LORA, r"student\.lora was not set"),
        (LORA, None, r"student\.lora is not set"),
    ],
)
def test_a_checkpoint_with_other_adapters_is_refused(
    tmp_path: Path, base: Path, was: Any, now: Any, reason: str
) -> None:
    config = config_of(tmp_path, was)
    folder = checkpointed(config, *begun(config), 1)
    changed = config_of(tmp_path, now).model_copy(update={"resume_from_checkpoint": True})
    with pytest.raises(ConfigError, match=rf"\({reason}") as refusal:
        starting_checkpoint(changed, identity_of(changed))
    assert refusal.value.args[0].count("student.lora") == 1
    # Also with accept_changed_settings.
    if now is None or was is None or now.get("alpha") == LORA["alpha"]:
        student, learner = begun(changed)
        with pytest.raises(ResumeError, match=r"student\.model: ") as refusal:
            Checkpoint.open(folder).restore(student, learner.optimizer)
        assert "\n" not in str(refusal.value)


def test_adapters_of_another_base_model_are_rejected(tmp_path: Path, base: Path) -> None:
    """Names and shapes are equal; folder and precision may change."""
    config = config_of(tmp_path)
    folder = checkpointed(config, *begun(config), 1)
    elsewhere = base.rename(tmp_path / "elsewhere")
    for dtype in ("float32", "bfloat16"):
        student, learner = begun(config_of(tmp_path, model=str(elsewhere), dtype=dtype))
        Checkpoint.open(folder).restore(student, learner.optimizer)
    base_in(base, seed=1)
    student, learner = begun(config)
    with pytest.raises(ResumeError, match="adapters of another base model"):
        Checkpoint.open(folder).restore(student, learner.optimizer)
