"""Which package may import what, read off the source and tried in fresh interpreters."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "mopd_protocol": "protocol",
    "mopd_server": "server",
    "mopd_client": "client",
    "mopd_losses": "losses",
    "mopd_trainer": "trainer",
    "mopd": "mopd",
}
MAY_IMPORT = {
    "mopd_protocol": set(),
    "mopd_server": {"mopd_protocol"},
    "mopd_client": {"mopd_protocol"},
    "mopd_losses": {"mopd_protocol"},
    "mopd_trainer": {"mopd_protocol", "mopd_client", "mopd_losses"},
    "mopd": {"mopd_protocol", "mopd_client", "mopd_losses", "mopd_server", "mopd_trainer"},
}
NEVER = {
    "mopd_protocol": {"torch", "transformers", "httpx", "fastapi", "ray", "vllm", "jinja2"},
    "mopd_client": {"torch", "transformers", "fastapi", "ray", "vllm"},
    "mopd_losses": {"httpx", "ray", "vllm", "transformers", "fastapi"},
    "mopd_server": {"httpx", "ray", "omegaconf"},
    "mopd_trainer": {"fastapi", "uvicorn"},
    "mopd": {"fastapi", "uvicorn"},
}


def imported_modules(package: str) -> set[str]:
    """Top-level names of everything that a package's source imports, anywhere in it."""
    found: set[str] = set()
    for path in (ROOT / FOLDERS[package]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_imports_only_the_packages_that_it_may(package: str) -> None:
    ours = {name for name in imported_modules(package) if name.startswith("mopd_")}
    assert ours - {package} <= MAY_IMPORT[package]


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_names_no_library_that_it_must_not_need(package: str) -> None:
    assert not imported_modules(package) & NEVER[package]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("mopd_protocol.codec", {"torch", "transformers", "httpx", "fastapi"}),
        ("mopd_client.pool", {"torch", "transformers", "fastapi"}),
        ("mopd_losses.build", {"httpx", "transformers", "fastapi"}),
        ("mopd_trainer.cli.main", {"torch", "transformers", "httpx", "rich"}),
        ("mopd.__main__", {"torch", "transformers", "httpx", "rich"}),
        ("mopd_server.main", {"torch", "transformers", "fastapi"}),
    ],
)
def test_importing_a_module_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    script = f"import sys, {module}; print(*(set({sorted(absent)!r}) & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def files_that_import(library: str, folder: str) -> set[str]:
    """Names of the files below a folder that import a library."""
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library)
        or (isinstance(node, ast.Import) and library in (n.name.split(".")[0] for n in node.names))
    }


@pytest.mark.parametrize(
    ("library", "folder", "file"),
    [
        ("vllm", "server", "mopd_server/engines/vllm/engine.py"),
        ("vllm", "trainer", "mopd_trainer/rollouts/vllm/engine.py"),
        ("ray", "trainer", "mopd_trainer/launch/cluster.py"),
        ("peft", "trainer", "mopd_trainer/student/lora.py"),
    ],
)
def test_one_file_of_a_package_imports_what_few_need(library: str, folder: str, file: str) -> None:
    assert files_that_import(library, folder) == {file}
