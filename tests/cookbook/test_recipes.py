"""Every recipe resolves, and runs for two steps, through its shell script, on tiny models."""

from pathlib import Path

import pytest

from mopd_losses.config import GoldConfig
from mopd_trainer.cli.main import main
from mopd_trainer.config.loading import load_run
from mopd_trainer.data.prompts import read_prompts
from tests.cookbook.recipes import COOKBOOK, RECIPES, ROOT, shell_line
from tests.trainer.whole_runs import journal

#: What a run of tiny models changes in addition to what the scripts read from the environment.
SMALL = (
    "rollout.max_new_tokens=40",
    "rollout.prompts_per_step=4",
    "rollout.engine=transformers",  # a vLLM for CPUs takes longer to start than all the rest
    "logging.tensorboard=false",
    "student.learning_rate=1e-3",
)

#: Without its cluster, which tests/trainer starts: here the recipe's teachers run already.
WITHOUT_RAY = (
    "resources=null",
    "student.sharding=none",
    *(
        f"teachers.{name}.{setting}"
        for name in ("math", "general")
        for setting in ("placement=url", "serve=null")
    ),
)


def _variables(recipe: str, stand_ins: dict[str, str], output: Path) -> dict[str, str]:
    urls = f"{stand_ins['math']},{stand_ins['general']}"
    if recipe == "same_tokenizer_mopd":
        urls = f"{stand_ins['family']},{stand_ins['family']}"
    elif recipe == "stock_vllm_teacher":
        urls = stand_ins["stock"]
    elif len(load_run(COOKBOOK / recipe / "run.yaml").teachers) == 1:
        urls = stand_ins["general"]
    return {
        "STUDENT_MODEL_ID": stand_ins["student"],
        "TEACHER_MODEL_ID": stand_ins["tokenizer"],
        "TEACHER_URLS": urls,
        "DEVICE": "cpu",
        "MAX_STEPS": "2",
        "OUTPUT_DIR": str(output),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resolves_and_runs(
    recipe: str,
    stand_ins: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    variables = _variables(recipe, stand_ins, tmp_path / "run")
    changes = (*SMALL, *WITHOUT_RAY) if recipe == "ray_cluster" else SMALL
    check = shell_line(recipe, tmp_path, {**variables, "COMMAND": "check"}, *changes)
    main(check)
    assert "configuration OK" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    main(["train", *check[1:]])
    steps = journal(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["loss"] > 0 for line in steps)
    run = load_run(COOKBOOK / recipe / "run.yaml")
    for name in run.scoring_teachers:
        assert any(f"teacher/{name}/loss_per_token" in line for line in steps)
    weights = "model" if run.student.lora is None else "adapter_model"
    assert (tmp_path / "run" / "final" / f"{weights}.safetensors").is_file()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_files_of_a_recipe_agree(recipe: str, tmp_path: Path) -> None:
    assert shell_line(recipe, tmp_path, {}) == ["train", f"cookbook/{recipe}/run.yaml"]
    readme = (COOKBOOK / recipe / "README.md").read_text()
    assert len(readme.splitlines()) <= 12
    assert f"bash cookbook/{recipe}/run.sh" in readme
    run = load_run(COOKBOOK / recipe / "run.yaml")
    for teacher in run.teachers.values():
        if teacher.placement == "ray":
            continue  # the run starts it, where a port is free
        if teacher.kind == "self":
            continue  # in the trainer's process
        port = teacher.url[0].rpartition(":")[2]
        assert f"--port {port}" in readme or (teacher.kind == "openai" and port == "8000")
    assert run.student.model == "Qwen/Qwen3-1.7B"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_data_of_a_recipe_can_be_read(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = load_run(COOKBOOK / recipe / "run.yaml")
    prompts = read_prompts(run.data, run.scoring_teachers)
    assert {name for prompt in prompts for name in prompt.teachers} == set(run.scoring_teachers)
    assert all((prompt.answer is not None) == run.data.uses_reference_answers for prompt in prompts)


@pytest.mark.parametrize("pair", ["ctkd", "gold"])
def test_gpu_and_npu_recipes_differ_only_in_the_device(pair: str) -> None:
    lines = [
        (COOKBOOK / f"{pair}_{kind}" / "run.yaml").read_text().splitlines()
        for kind in ("gpu", "npu")
    ]
    differing = [both for both in zip(*lines, strict=True) if both[0] != both[1]]
    assert differing == [("  device: cuda", "  device: npu")]


def test_an_npu_recipe_without_torch_npu_is_one_sentence(
    stand_ins: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    variables = {**_variables("gold_npu", stand_ins, tmp_path / "run"), "DEVICE": ""}
    with pytest.raises(SystemExit):
        main(shell_line("gold_npu", tmp_path, variables, *SMALL))
    errors = capsys.readouterr().err
    assert errors.startswith("mopd: student.device is 'npu', which needs torch_npu")
    assert errors.count("\n") == 1
    assert "install the torch_npu that is made for this torch" in errors


def test_gold_recipes_take_the_published_settings() -> None:
    for name in ("gold_gpu", "gold_npu"):
        run = load_run(COOKBOOK / name / "run.yaml")
        assert all(t.loss == GoldConfig(beta=0.5, merge="bayesian") for t in run.teachers.values())
        assert {t.top_k for t in run.teachers.values()} == {64}
        assert run.student.learning_rate == 1e-6
