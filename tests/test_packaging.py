"""The wheel that users install: each extra in an environment that holds nothing else of ours."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Installed first where an extra needs it, as the Makefile does.
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
    """Built once, of what the images copy too."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)], check=True
    )
    (found,) = folder.glob("mopd-*.whl")
    return found


def _environment(folder: Path, *requirements: str) -> Path:
    """Where the executables of a fresh environment with these requirements are."""
    venv.create(folder, with_pip=True)
    for requirement in requirements:
        subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement], check=True
        )
    return folder / "bin"


def _run(binary: Path, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    # -I and another folder: nothing of this tree may be found.
    return subprocess.run(
        [binary, *arguments], capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin"}
    )


def test_the_light_parts_import_without_an_extra(wheel: Path, tmp_path: Path) -> None:
    binaries = _environment(tmp_path / "venv", str(wheel))
    imported = _run(binaries / "python", "-I", "-c", _LIGHT, folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
    refused = _run(binaries / "mopd", "check", "run.yaml", folder=tmp_path)
    assert refused.returncode == 2
    assert "pip install 'mopd[trainer]'" in refused.stderr


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
def test_an_extra_brings_all_that_its_program_needs(
    extra: str, script: str, program: str, wheel: Path, tmp_path: Path
) -> None:
    binaries = _environment(tmp_path / "venv", TORCH, f"{wheel}[{extra}]")
    imported = _run(binaries / "python", "-I", "-c", script, folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
    helped = _run(binaries / program, "--help", folder=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith(f"usage: {program}")


def test_the_docs_extra_builds_the_site(wheel: Path, tmp_path: Path) -> None:
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
def test_an_extra_that_is_too_large_to_install_here_can_be_resolved(extra: str) -> None:
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
    wanted = {"vllm": ("vllm==", "fastapi=="), "dev": ("pytest==", "mkdocs-material==")}[extra]
    assert all(f"\n{name}" in resolved.stdout for name in wanted)
