"""Tests of the pages: examples parse, quoted messages exist, generated parts are current."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from docs import configuration_reference, drawings, metrics_reference
from mopd_losses.config import LossConfig
from mopd_server.http.http_metrics import HttpMetrics
from mopd_server.main import parser
from mopd_server.ray_serve.teachers_file import load_teachers_file
from mopd_server.scoring.metrics import ServiceMetrics
from mopd_trainer.config.loading import parse_run
from tests.docs.pages import PAGES, ROOT, code_spans, examples

YAML = examples("yaml")
#: Settings that are missing from an example of a part of a run.
REST = {
    "output_dir": "run",
    "max_steps": 1,
    "data": {"prompts": "prompts.jsonl"},
    "student": {"model": "student"},
    "rollout": {"max_new_tokens": 8},
}
#: Options of other programs than ``mopd-teacher``.
OTHERS = {
    "--strict",
    "--max-logprobs",
    "--enable-scale-out",
    "--text",
    "--rm-url",
    "--logprobs-mode",
}
#: ``section.key``, ``section.key: value`` or ``key: value``.
SETTING = re.compile(r"(?=.*[.:])([a-z_]+(?:\.\w+)*)(?:: (.+))?")
LOSS: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).parent / "mkdocs"
    settings = ROOT / "docs" / "mkdocs.yml"
    ended = subprocess.run(
        [mkdocs, "build", "--strict", "--config-file", settings, "--site-dir", tmp_path],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    ids = set(re.findall(r'id="(mopd[\w.]+)"', (tmp_path / "api.html").read_text()))
    assert public_names() - ids == set(), "names that the API page does not document"
    assert "WARNING" not in ended.stderr
    assert (tmp_path / "index.html").is_file()
    assert "fonts.g" not in (tmp_path / "index.html").read_text()  # nothing from elsewhere


def public_names() -> set[str]:
    """Return the qualified public names of the packages on the API page."""
    packages = ("mopd_client", "mopd_losses", "mopd_protocol", "mopd_server", "mopd_trainer")
    return {f"{p}.{name}" for p in packages for name in import_module(p).__all__}


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "docs" / "mkdocs.yml").read_text()
    assert set(re.findall(r"[\w-]+\.md", text)) == {page.name for page in PAGES.glob("*.md")}


def test_the_configuration_page_is_current() -> None:
    written = (PAGES / "configuration.md").read_text()
    assert written == configuration_reference.page(), "run docs/configuration_reference.py"


def test_the_metrics_page_is_current() -> None:
    text = (PAGES / "metrics.md").read_text()
    assert text == metrics_reference.page(), "run python -m docs.metrics_reference"


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_current(name: str) -> None:
    assert (PAGES / name).read_text() == drawings.DRAWINGS[name](), "run docs/drawings.py"


@pytest.mark.parametrize("place", range(len(YAML)), ids=lambda at: f"{YAML[at][0]}-{at}")
def test_an_example_of_a_run_or_of_teachers_is_one(place: int, tmp_path: Path) -> None:
    page, text = YAML[place]
    if isinstance(yaml.safe_load(text).get("teachers"), list):
        (tmp_path / "teachers.yaml").write_text(text)
        load_teachers_file(tmp_path / "teachers.yaml")
        return
    values = OmegaConf.to_container(OmegaConf.merge(REST, yaml.safe_load(text)))
    parse_run(values, source=page)


def test_lines_of_data_are_json() -> None:
    lines = [line for _, text in examples("json") for line in text.splitlines()]
    assert len(lines) >= 2
    assert all("teacher" in json.loads(line) for line in lines)


def test_quoted_messages_are_messages_of_ours() -> None:
    text = (PAGES / "troubleshooting.md").read_text()
    quoted = re.findall(r"^`([^`]+)`\n:", text, re.M)
    assert len(quoted) > 20
    known_messages = "\n".join(_messages())
    assert [message for message in quoted if message not in known_messages] == []


def test_metrics_on_the_operations_page_are_exported() -> None:
    service = ServiceMetrics(
        queued_sequences=lambda: 0.0, queued_tokens=lambda: 0.0, tokens_by_key=dict
    )
    exposition = (service.exposition() + HttpMetrics(ready=lambda: True).exposition()).decode()
    exported = set(re.findall(r"^# TYPE (\w+)", exposition, re.M))
    named = {span for span in code_spans("operations.md") if span.startswith("mopd_")}
    assert len(named) > 10
    assert named - exported == set()


@pytest.mark.parametrize("page", ["operations.md", "security.md", "troubleshooting.md", "rest.md"])
def test_options_on_a_page_are_the_teachers(page: str) -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", _help())) | OTHERS
    named = {o for span in code_spans(page) for o in re.findall(r"(?<!\w)--[a-z][a-z-]+", span)}
    assert named
    assert named - known == set()


def test_keys_on_pages_are_keys_of_a_run() -> None:
    known = set(re.findall(r"`([a-z_.A-Z]+)`", (PAGES / "configuration.md").read_text()))
    for page in ("troubleshooting.md", "operations.md", "losses.md", "concepts.md"):
        spans = code_spans(page)
        named = {s for s in spans if re.fullmatch(r"(data|student|rollout)\.[a-z_]+", s)}
        assert named - known == set(), page


def test_settings_next_to_those_of_other_projects_exist() -> None:
    rows = re.findall(r"^\|.+ \| (.+) \|$", (PAGES / "coming-from.md").read_text(), re.M)
    spans = {span for cell in rows for span in re.findall(r"`([^`]+)`", cell)}
    settings = {span: match.groups() for span in spans if (match := SETTING.fullmatch(span))}
    assert len(settings) > 50
    kinds = _kinds_of_settings()
    wrong = [span for span, (key, value) in settings.items() if not _is_ours(key, value, kinds)]
    assert wrong == []


def _kinds_of_settings() -> dict[str, str]:
    """Map each key to its types in the reference; a loss's key to those of every loss with it."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", (PAGES / "configuration.md").read_text(), re.M)
    return {key: " ".join(kind for other, kind in rows if other == key) for key, _ in rows}


def _is_ours(key: str, value: str | None, kinds: dict[str, str]) -> bool:
    """Return whether a key is in the reference and accepts the value (no section: a teacher's)."""
    key = key.replace("teachers.math", "teachers.NAME")
    if value is None:
        return key in kinds or any(known.startswith(f"{key}.") for known in kinds)
    kind = kinds.get(key) or kinds.get(f"teachers.NAME.{key}") or ""
    if kind == "a loss":
        return _is_loss(yaml.safe_load(value))
    if f"`{value}`" in kind or "text" in kind:
        return True
    return kind.startswith(("integer", "true")) and not isinstance(yaml.safe_load(value), str)


def _is_loss(settings: object) -> bool:
    try:
        LOSS.validate_python(settings)
    except ValidationError:
        return False
    return True


def _help() -> str:
    (commands,) = (a for a in parser()._actions if a.dest == "command")  # argparse has no other way
    assert commands.choices is not None
    return "".join(
        commands.choices[name].format_help()  # type: ignore[index]
        for name in ("serve", "deploy")
    )


def _messages() -> Iterator[str]:
    """Every string in the packages, with a gap where an f-string puts a value."""
    for package in ("protocol", "server", "client", "losses", "trainer"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        part.value if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
