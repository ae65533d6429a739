"""``uv.lock`` pins every requirement, and the images install from it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose_files import DEPLOY

ROOT = DEPLOY.parent
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def requirements(*extras: str) -> list[Requirement]:
    """Requirements of the core and of some extras, with nested extras resolved."""
    requirements = list(map(Requirement, PROJECT["dependencies"]))
    pending = list(extras)
    while pending:
        for requirement in map(Requirement, OPTIONAL[pending.pop()]):
            if requirement.name == PROJECT["name"]:
                pending += requirement.extras
            else:
                requirements.append(requirement)
    return requirements


def locked_versions(name: str) -> list[str]:
    """All versions of one distribution in the lock; markers select one of them."""
    canonical = canonicalize_name(name)
    return [package["version"] for package in LOCK["package"] if package["name"] == canonical]


def export(*options: str) -> dict[str, str]:
    """Distribution -> version for Linux and Python 3.11, as ``uv export`` prints them."""
    lines = subprocess.run(
        [Path(sys.executable).parent / "uv", "export", "--offline", "--no-annotate", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout.splitlines()
    pinned = map(Requirement, (line.rstrip(" \\") for line in lines if line[:1].isalnum()))
    environment = {"python_version": "3.11", "python_full_version": "3.11.13"}
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in pinned
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


def test_the_lock_satisfies_every_requirement() -> None:
    for requirement in requirements(*OPTIONAL):
        versions = locked_versions(requirement.name)
        assert versions, f"run make lock: {requirement} is not locked"
        for version in versions:
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_the_lock_was_made_from_the_current_requirements() -> None:
    (project,) = (package for package in LOCK["package"] if package["name"] == PROJECT["name"])
    locked = {(r["name"], r.get("marker")) for r in project["metadata"]["requires-dist"]}
    declared = {(r.name, None) for r in requirements()}
    for extra, texts in OPTIONAL.items():
        declared |= {(Requirement(text).name, f"extra == '{extra}'") for text in texts}
    assert locked == declared, "run make lock"


def test_the_lock_names_no_host_but_pypi() -> None:
    text = (ROOT / "uv.lock").read_text()
    hosts = set(re.findall(r"[a-z+]+://[^/\"\s]*", text))
    assert hosts == {"https://pypi.org", "https://files.pythonhosted.org"}
    sources = {tuple(package["source"].items()) for package in LOCK["package"]}
    assert sources == {(("registry", "https://pypi.org/simple"),), (("editable", "."),)}


@pytest.mark.parametrize(
    ("image", "extras"),
    [("teacher.cpu", ("server",)), ("student", ("server", "lora", "ray"))],
)
def test_an_image_installs_locked_versions_without_torch(
    image: str, extras: tuple[str, ...]
) -> None:
    dockerfile = (DEPLOY / "docker" / f"{image}.Dockerfile").read_text()
    command = re.findall(r"uv export (.*?)--output-file", dockerfile, re.S)[0]
    options = command.replace("\\\n", " ").split()
    assert "--frozen" in options
    assert "--no-hashes" not in options
    exported = export(*options)
    required = {r.name for r in requirements(*extras)} - {"torch"}
    assert {canonicalize_name(name) for name in required} <= exported.keys()
    assert not [name for name in exported if name.startswith(("torch", "nvidia", "mopd"))]
    assert "--no-deps --require-hashes" in dockerfile


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_tools_of_an_image_have_the_locked_versions(file: Path) -> None:
    for tool, version in re.findall(r"\b(uv|build)==(\S+)", file.read_text()):
        assert locked_versions(tool) == [version]


def test_the_npu_image_gets_all_of_the_server_but_torch_and_transformers() -> None:
    excluded = {r.name for r in requirements("server")} - {r.name for r in requirements("service")}
    assert excluded == {"torch", "transformers"}
    assert '.whl)[service]"' in (DEPLOY / "docker" / "teacher.npu.Dockerfile").read_text()
