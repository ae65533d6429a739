"""The Python example of the README runs with the installed wheel, not with this tree."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from tests import tiny_models
from tests.broker import Broker

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.process, pytest.mark.slow]


def example(page: str) -> str:
    """Return the Python example of a page."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return block


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the interpreter of an environment with the wheel.

    Third-party packages are those of this environment; its editable install of mopd is not
    active, because a .pth file is read in the environment's site-packages only.
    """
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("mopd-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    install = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def test_the_example_is_the_same_on_all_pages() -> None:
    assert example("README.md") == example("docs/pages/quickstart.md")


def test_the_ten_lines_run(tmp_path: Path, broker: Broker, python: Path) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "model")
    address = broker.serve({"math": folder})["math"]
    prompts = [{"messages": [{"role": "user", "content": f"{n} + 4 ="}]} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    run = {
        "output_dir": "run",
        "max_steps": 500,
        "data": {"prompts": "prompts.jsonl", "default_teacher": "math"},
        "student": {"model": str(folder), "device": "cpu"},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 4},
        "teachers": {"math": {"url": address, "top_k": 8, "loss": {"type": "topk_kl"}}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    lines = example("README.md").replace("http://127.0.0.1:8101", address)
    assert "max_steps=100" in lines
    script = lines.replace("max_steps=100", "max_steps=1") + "print(mopd.__file__)\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    completed = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert completed.returncode == 0, completed.stderr
    printed = completed.stdout.splitlines()
    assert re.search(r"-\d+\.\d+", printed[0])
    assert Path(printed[-1]).is_relative_to(tmp_path / "venv")
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert len((tmp_path / "run" / "journal.jsonl").read_text().splitlines()) == 1
