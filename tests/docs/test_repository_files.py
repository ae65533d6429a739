"""Workflows, templates and citation follow their schemas, and name targets that exist."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT

BIN = Path(sys.executable).parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def project() -> dict[str, str]:
    """Return the project table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_follows_its_schema(schema: str) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_ci_tests_every_supported_python() -> None:
    ci = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    versions = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert f">={versions[0]}" == project()["requires-python"]
    assert versions == ["3.11", "3.12", "3.13"]


def test_the_citation_and_the_changelog_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"]
    released = f"## [{project()['version']}] - {citation['date-released']}"
    assert released in (ROOT / "CHANGELOG.md").read_text()


def test_spelling() -> None:
    completed = subprocess.run([BIN / "codespell"], capture_output=True, text=True, cwd=ROOT)
    assert completed.returncode == 0, completed.stdout


def test_hints_install_from_a_clone() -> None:
    """``mopd[lora]`` would be installed from PyPI, where the project has no release."""
    packages = ("mopd", "client", "losses", "protocol", "server", "trainer")
    folders = [ROOT / name for name in (*packages, "cookbook", "deploy", "docs/pages")]
    files = [ROOT / "README.md", *(file for folder in folders for file in folder.rglob("*.*"))]
    assert len(files) > 300
    generated = ROOT / "docs/pages/configuration.md"  # from docstrings, which are searched too
    hints = re.compile(rb"mopd\[[a-z]")
    text = (file for file in files if file.is_file() and file.suffix != ".pyc")
    named = {file for file in text if hints.search(file.read_bytes())}
    assert named <= {generated}


def test_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {
        target for file in WORKFLOWS for target in re.findall(r"\bmake (\S+)", file.read_text())
    }
    assert called
    assert called <= targets
