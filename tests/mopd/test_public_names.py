"""The public names of every package: pinned, sorted, importable, and light to import."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "ray", "vllm", "peft", "rich", "matplotlib"}
SOURCES = {
    "mopd": ROOT / "mopd",
    "mopd_client": ROOT / "client" / "mopd_client",
    "mopd_losses": ROOT / "losses" / "mopd_losses",
    "mopd_protocol": ROOT / "protocol" / "mopd_protocol",
    "mopd_server": ROOT / "server" / "mopd_server",
    "mopd_trainer": ROOT / "trainer" / "mopd_trainer",
}
#: The public names. A change here is a change of the public API: record it in CHANGELOG.md.
PINNED = (ROOT / "tests" / "mopd" / "public_names.txt").read_text()


def pinned_names() -> dict[str, list[str]]:
    """Return package -> public names, as recorded."""
    lines = (line.split(": ") for line in PINNED.splitlines())
    return {package: names.split() for package, names in lines}


@pytest.mark.parametrize("package", SOURCES)
def test_the_public_names_are_pinned_and_sorted(package: str) -> None:
    names = import_module(package).__all__
    assert names == sorted(names)
    assert names == pinned_names()[package], "record the change in tests/mopd/public_names.txt"


@pytest.mark.parametrize("package", SOURCES)
def test_every_public_name_is_importable_and_listed(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is getattr(module, name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("package", SOURCES)
def test_names_for_type_checkers_are_the_public_names(package: str) -> None:
    body = ast.parse((SOURCES[package] / "__init__.py").read_text()).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(import_module(package).__all__) - {"__version__"}


@pytest.mark.process
def test_importing_the_packages_loads_nothing_heavy() -> None:
    script = f"import sys, {', '.join(SOURCES)}; print(*({HEAVY!r} & sys.modules.keys()))"
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == []


@pytest.mark.process
def test_the_help_of_the_command_line_does_not_load_torch() -> None:
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mopd", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.startswith("usage: mopd")
    imported = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert not imported & HEAVY


#: Benchmarks of internal parts, which have no public API.
INTERNAL = {
    "bench/event_loop.py": "measures the service's event loop with an engine that computes nothing",
    "bench/front_end.py": "measures the service without its engine",
    "bench/head_ratios.py": "gives the head a teacher's hidden states without a run",
    "bench/language_model/__main__.py": "measures a run that a signal has stopped",
    "bench/loop_stalls.py": "measures the service's event loop from inside",
    "bench/packing.py": "makes steps of one micro-batch in both layouts, without a run",
    "bench/ranks.py": "starts ranks and Ray workers without a run",
    "bench/response_checks.py": "measures decoding and checking without a network",
    "bench/results/averages.py": "trains with tables of teachers, without a service",
    "bench/results/controls.py": "trains with control arms, without a service",
    "bench/results/recovery.py": "trains with tables of teachers, without a service",
    "bench/results/reinforcement.py": "trains with tables of rewards, without a service",
    "bench/results/students.py": "trains with tables of teachers, without a service",
    "bench/results/truncation.py": "compares forms of a divergence on known distributions",
    "bench/results/uncertainty.py": "compares divergences on known distributions",
    "bench/scaling/replicas.py": "replaces the engine's forward pass by a wait",
    "bench/scaling/workload.py": "divides a step as the client does",
    "bench/translation_cost.py": "translates completions of a model, as tokens",
    "bench/xtoken.py": "is a loss, written with the parts of the package's losses",
}


def imports_of_modules(path: Path) -> list[str]:
    """Return imports from our packages of anything but a public name."""
    private: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if alias.name.startswith("mopd_")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mopd_"):
            module = node.module or ""
            public = pinned_names().get(module, [])
            private += [f"{module}.{a.name}" for a in node.names if a.name not in public]
    return private


@pytest.mark.parametrize("folder", ["cookbook", "docs", "mopd/demo", "bench"])
def test_a_folder_imports_only_public_names(folder: str) -> None:
    private = {
        path.relative_to(ROOT).as_posix(): imports
        for path in (ROOT / folder).rglob("*.py")
        if (imports := imports_of_modules(path))
    }
    assert private.keys() == {name for name in INTERNAL if name.startswith(f"{folder}/")}, private
