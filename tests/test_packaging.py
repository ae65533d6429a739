"""Tests of the wheel: each extra, installed in a clean environment, imports and runs."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Installed before an extra that depends on it, as in the Makefile.
TORCH = "torch==2.13.0"
_LIGHT = "import sys, mopd_client.pool, mopd_protocol.codec; assert 'torch' not in sys.modules"
_SERVER = (
    "import mopd_server.app, mopd_server.engines.transformers; "
    "from importlib.util import find_spec; assert not find_spec('omegaconf')"
)
_TRAINER = (
    "import mopd_trainer.loop, mopd_trainer.config.loading, mopd_losses.build; "
    "from importlib.util import find_spec; assert not find_spec('fastapi')"
)

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, once for a session."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True
    )
    (built,) = folder.glob("mopd-*.whl")
    return built


def _environment(folder: Path, *requirements: str) -> Path:
    """Create a virtual environment with these requirements; return its folder of executables."""
    venv.create(folder, with_pip=True)
    for requirement in requirements:
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement], check=True
        )
    return folder / "bin"


def _run(binary: Path, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    # -I and a separate working folder exclude the modules of this tree.
    return subprocess.run(
        [binary, *arguments], capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin"}
    )


def test_protocol_and_client_import_without_extras(wheel: Path, tmp_path: Path) -> None:
    binaries = _environment(tmp_path / "venv", str(wheel))
    imported = _run(binaries / "python", "-I", "-c", _LIGHT, folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
    failed = _run(binaries / "mopd", "check", "run.yaml", folder=tmp_path)
    assert failed.returncode == 2
    assert "pip install '.[trainer]'" in failed.stderr


@pytest.mark.parametrize(
    ("extra", "script", "program"),
    [
        ("server", _SERVER, "mopd-teacher"),
        ("trainer", _TRAINER, "mopd"),
        ("lora", "import mopd_trainer.loop, mopd_trainer.student.lora, peft", "mopd"),
        (
            "ray",
            "import mopd_trainer.loop, mopd_trainer.launch.cluster, ray.dashboard.head",
            "mopd",
        ),
    ],
)
def test_extra_installs_all_requirements_of_its_program(
    extra: str, script: str, program: str, wheel: Path, tmp_path: Path
) -> None:
    binaries = _environment(tmp_path / "venv", TORCH, f"{wheel}[{extra}]")
    imported = _run(binaries / "python", "-I", "-c", script, folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
    helped = _run(binaries / program, "--help", folder=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith(f"usage: {program}")


def test_docs_extra_builds_the_site(wheel: Path, tmp_path: Path) -> None:
    binaries = _environment(tmp_path / "venv", f"{wheel}[docs]")
    built = _run(
        binaries / "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "docs" / "mkdocs.yml"),
        "--site-dir",
        str(tmp_path / "site"),
        folder=tmp_path,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "index.html").is_file()


@pytest.mark.parametrize("extra", ["vllm", "dev"])
def test_large_extra_resolves(extra: str) -> None:
    resolved = subprocess.run(
        [
            Path(sys.executable).parent / "uv",
            *("pip", "compile", "--quiet", "--python-version", "3.11.13", "--no-header"),
            *("--python-platform", "x86_64-unknown-linux-gnu", "--extra", extra),
            "pyproject.toml",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert resolved.returncode == 0, resolved.stderr
    expected = {"vllm": ("vllm==", "fastapi=="), "dev": ("pytest==", "mkdocs-material==")}[extra]
    assert all(f"\n{name}" in resolved.stdout for name in expected)
