"""The recipe with teachers on Ray Serve, run as written on models of the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cookbook.recipes import COOKBOOK
from tests.ports import free_port
from tests.trainer.launch.test_cluster import processes
from tests.trainer.whole_runs import journal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def test_the_recipe_deploys_trains_and_removes_its_teachers(
    recipe_models: dict[str, Path], tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name, model in (("sums-teacher", "math"), ("words-teacher", "general"), ("student",) * 2):
        (models / name).symlink_to(recipe_models[model])
    prompts = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "12 + 30 ="}
    lines = [{"messages": [message], "teacher": name} for name in ("sums", "words")] * 16
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    variables = {"MODELS": models, "PROMPTS": prompts, "OUTPUT_DIR": tmp_path / "out"}
    variables |= {"PORT": free_port(), "MAX_STEPS": 2, "MOPD_TEST_RUN": tmp_path}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    recipe = subprocess.run(
        ["bash", COOKBOOK / "ray_serve_cpu.sh", "logging.tensorboard=false"],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
    )
    assert recipe.returncode == 0, recipe.stderr
    steps = journal(tmp_path / "out" / "run")
    assert [step["step"] for step in steps] == [1, 2]
    for name in ("sums", "words"):
        assert any(f"teacher/{name}/loss_per_token" in step for step in steps)
    assert "2/2 replicas" in (tmp_path / "out" / "deploy.log").read_text()
    assert not processes(tmp_path, "ServeReplica")
