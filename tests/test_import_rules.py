"""Tests of the import rules: allowed packages, forbidden libraries, light entry points."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
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
    # transformers is imported in one function; an entry point below imports none.
    "mopd_client": {"torch", "fastapi", "ray", "vllm"},
    "mopd_losses": {"httpx", "ray", "vllm", "transformers", "fastapi"},
    "mopd_server": {"httpx", "omegaconf"},
    "mopd_trainer": {"fastapi", "uvicorn"},
    "mopd": {"fastapi", "uvicorn"},
}


def imported_modules(package: str) -> set[str]:
    """Return the top-level names of all modules that a package's source imports."""
    names: set[str] = set()
    for path in (ROOT / FOLDERS[package]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("package", FOLDERS)
def test_package_imports_only_allowed_packages(package: str) -> None:
    imported = {name for name in imported_modules(package) if name.startswith("mopd_")}
    # Only mopd_server.translation does (import-linter's contract), which is imported on use.
    imported -= {"mopd_client", "mopd_losses"} if package == "mopd_server" else set()
    assert imported - {package} <= MAY_IMPORT[package]


@pytest.mark.parametrize("package", FOLDERS)
def test_package_imports_no_forbidden_library(package: str) -> None:
    assert not imported_modules(package) & NEVER[package]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mopd_protocol.codec", {"torch", "transformers", "httpx", "fastapi"}),
        ("mopd_client.pool", {"torch", "transformers", "fastapi"}),
        ("mopd_client.services.vllm", {"torch", "transformers", "fastapi"}),
        ("mopd_losses.build", {"httpx", "transformers", "fastapi"}),
        ("mopd_losses.translation.translator", {"torch", "transformers", "httpx"}),
        ("mopd_trainer.cli.main", {"torch", "transformers", "httpx", "rich"}),
        ("mopd.__main__", {"torch", "transformers", "httpx", "rich"}),
        ("mopd_server.main", {"torch", "transformers", "fastapi", "pydantic", "ray"}),
    ],
)
def test_entry_point_imports_no_heavy_library(module: str, forbidden: set[str]) -> None:
    script = f"import sys, {module}; print(*(set({sorted(forbidden)!r}) & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def files_that_import(library: str, folder: str) -> set[str]:
    """Return the names of the files below a folder that import a library."""
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library)
        or (isinstance(node, ast.Import) and library in (n.name.split(".")[0] for n in node.names))
    }


@pytest.mark.parametrize(
    ("library", "folder", "files"),
    [
        ("vllm", "server", "mopd_server/engines/vllm/"),
        ("ray", "server", "mopd_server/ray_serve/"),
        ("vllm", "trainer", "mopd_trainer/rollouts/vllm/engine.py"),
        ("peft", "trainer", "mopd_trainer/student/lora.py"),
    ],
)
def test_optional_library_is_imported_by_one_file_or_folder(
    library: str, folder: str, files: str
) -> None:
    importers = files_that_import(library, folder)
    assert importers
    assert all(importer.startswith(files) for importer in importers)


def test_only_the_launch_folder_imports_ray() -> None:
    files = files_that_import("ray", "trainer")
    assert files
    assert {Path(file).parent.as_posix() for file in files} == {"mopd_trainer/launch"}


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph(*FOLDERS, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises a CycleError with the modules of a circle
