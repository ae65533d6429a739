"""The locks under ``requirements/`` hold everything that the project asks for, at one version."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose_files import DEPLOY

ROOT = DEPLOY.parent
#: Installed first and by version, from where its builds for the accelerator at hand are.
APART = {"torch"}
EXTRAS = ("server", "trainer", "ray", "lora", "docs", "dev")


def _asked(extra: str | None) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(map(Requirement, project["dependencies"]))
    extras = [extra] if extra else []
    while extras:
        for text in project["optional-dependencies"][extras.pop()]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                extras += requirement.extras
            else:
                asked.append(requirement)
    return [requirement for requirement in asked if requirement.name not in APART]


def _locked(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and line[0] not in "# "]
    pairs = [line.split(" ;")[0].split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), f"{path} holds something that is no version"
    return {canonicalize_name(name.split("[")[0]): version for name, version in pairs}


@pytest.mark.parametrize("extra", [*EXTRAS, None])
def test_a_lock_holds_what_is_asked_for(extra: str | None) -> None:
    locked = _locked(ROOT / "requirements" / f"{extra or 'client'}.txt")
    for requirement in _asked(extra):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"run requirements/compile.sh: {requirement} is not locked"
        assert requirement.specifier.contains(locked[name], prereleases=True), requirement
    assert not {name for name in locked if name in APART or name.startswith("nvidia")}


def test_the_npu_image_gets_all_of_the_server_but_torch_and_transformers() -> None:
    lines = (ROOT / "requirements" / "npu.txt").read_text().split()
    asked = {str(requirement) for requirement in _asked("server")}
    assert set(lines) == {text for text in asked if not text.startswith("transformers")}


@pytest.mark.parametrize("extra", ["trainer", "lora"])
def test_what_is_installed_beside_the_server_is_locked_at_the_same_versions(extra: str) -> None:
    server, other = (_locked(ROOT / "requirements" / f"{e}.txt") for e in ("server", extra))
    assert {n: server[n] for n in server.keys() & other} == {
        n: other[n] for n in server.keys() & other
    }
