"""The page of a run: its data are the journal's, and it runs and loads nothing of another place."""

import json
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.errors import ConfigError, DiskError
from mopd_trainer.pages.document import document
from mopd_trainer.pages.report import write_report
from mopd_trainer.pages.run_data import RunData, selected, updates
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from tests.trainer.pages.made_runs import append, completion, completions, journal, write_run

HOSTILE = '</script><script>alert(1)</script><img src="http://example.org/x" onerror=alert(1)>'

values = st.one_of(st.none(), st.floats(-1e6, 1e6, width=32))
lines = st.lists(st.dictionaries(st.sampled_from("abc"), values), min_size=1, max_size=30)


class Page(HTMLParser):
    """Elements of a page with their texts, as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._is_open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        self._is_open = True

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.elements[-1][2].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """Return the texts of elements."""
        return [
            "".join(texts)
            for name, present, texts in self.elements
            if name == tag and attributes.items() <= present.items()
        ]

    @property
    def data(self) -> Any:
        """The embedded data."""
        return json.loads(self.texts("script", id="data")[0])


def decoded(snapshot: dict[str, Any]) -> list[dict[str, float]]:
    """Return the lines of the journal in a snapshot, without values that were not measured."""

    def array(text: str, kind: str) -> Any:
        return np.frombuffer(b64decode(text), dtype=kind)

    steps = array(snapshot["steps"], "<f4")
    rows: list[dict[str, float]] = [{"step": int(step)} for step in steps]
    for key, parts in snapshot["columns"].items():
        column = array(parts[-1], "<f4")
        indices = range(len(column)) if len(parts) == 1 else array(parts[0], "<i4")
        for index, value in zip(indices, column.tolist(), strict=True):
            if value == value:
                rows[index][key] = value
    return rows


@given(lines)
def test_columns_are_the_journal(tmp_path_factory: pytest.TempPathFactory, each: Any) -> None:
    # Steps 3 and 4 have a second line: an evaluation when the run was resumed.
    steps = sorted([*range(len(each)), 3, 4])[: len(each)]
    folder = tmp_path_factory.mktemp("run")
    written = [{"step": step, **line} for step, line in zip(steps, each, strict=True)]
    write_run(folder, written)
    expected: dict[int, dict[str, Any]] = {}
    for line in written:
        measured = {key: value for key, value in line.items() if value is not None}
        expected[line["step"]] = expected.get(line["step"], {}) | measured
    run = RunData(folder)
    run.update()
    assert decoded(run.snapshot()) == list(expected.values())


def test_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    hostile = completion([HOSTILE.encode(), b"\xe7\x9a"], teacher=HOSTILE, metadata={"a": HOSTILE})
    lines = [{**line, f"teacher/{HOSTILE}/loss": 1.0} for line in journal(3)]
    page = Page(write_report(write_run(tmp_path / "run", lines, [hostile])).read_text())
    assert {tag for tag, _, _ in page.elements} <= {
        *("html", "head", "meta", "link", "title", "style", "body", "div", "noscript", "script")
    }
    for _, attributes, _ in page.elements:
        assert not attributes.keys() & {"src", "style", "onload"}
        assert attributes.get("href") in (None, "data:,")
    (policy,) = [a["content"] for _, a, _ in page.elements if "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy
    for tag in ("script", "style"):
        code = [text for text in page.texts(tag) if text not in page.texts("script", id="data")]
        digests = {b64encode(sha256(text.encode()).digest()).decode() for text in code}
        directive = next(part for part in policy.split("; ") if part.startswith(tag))
        assert digests == set(re.findall("sha256-([^']+)", directive))
    assert page.data["runs"][0]["completions"] == [hostile]
    assert "connect-src 'self'" in document("run", "title", {}, served=True)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (JOURNAL, "[" * 10**5),
        (JOURNAL, json.dumps({"step": 10**400})),
        (JOURNAL, '{"step": true}'),
        (JOURNAL, '{"step": 1e999}'),
        (COMPLETIONS, '{"step": 1, "prompt": [{"role": "user"}]}'),
        (COMPLETIONS, '{"step": 1, "nats": [1]}'),
        (COMPLETIONS, '{"step": 1, "completion": 7}'),
    ],
)
def test_a_line_of_another_form_is_damage(
    tmp_path: Path, name: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run", journal(2))
    with (tmp_path / "run" / name).open("a") as file:
        file.write(line + "\n")
    for live in (True, False):
        data = RunData(tmp_path / "run", live=live)
        data.update()
        assert [place.split(":")[0] for place in data.damaged] == [name]
    write_report(tmp_path / "run")
    assert data.damaged[0] in caplog.text


def test_values_beyond_float32_and_other_encodings_are_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", journal(2))
    (folder / "config.yaml").write_bytes(b"max_steps: 7 # \xff")
    append(folder / JOURNAL, [{"step": 3, "loss": 10**400, "other": 1.0}])
    run = Page(write_report(folder).read_text()).data["runs"][0]
    assert run["max_steps"] == 7
    assert "other" in run["columns"]


def test_a_folder_as_output_is_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", journal(2))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiskError):
        write_report(folder, output=Path())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_damaged_lines_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", journal(2), completions(2))
    for name in (JOURNAL, COMPLETIONS):
        first, *rest = (folder / name).read_text().splitlines(True)
        (folder / name).write_text(f'{first}{{"step": 2, "lo\n5\n{"".join(rest)}{{"step": 9')
    page = Page(write_report(folder).read_text())
    run = page.data["runs"][0]
    assert run["damaged"] == [f"{name}:{n}" for name in (JOURNAL, COMPLETIONS) for n in (2, 3)]
    assert run["damaged_lines"] == 4
    assert [line["step"] for line in decoded(run)] == [1, 2]
    assert len(run["completions"]) == 2


def test_folder_without_a_finished_step_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", write_run(tmp_path / "empty", [])):
        with pytest.raises(ConfigError) as caught:
            write_report(folder)
        assert caught.value.key == str(folder)
    assert not (tmp_path / "absent").exists()


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", journal(1))
    (folder / "report.html").mkdir()
    with pytest.raises(DiskError) as caught:
        write_report(folder)
    assert caught.value.key == str(folder / "report.html")
    assert sorted(path.name for path in folder.iterdir()) == [COMPLETIONS, JOURNAL, "report.html"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 300))
def test_selection_has_first_and_last_step_and_keeps_the_budget(
    sizes: list[int], budget: int
) -> None:
    samples = [(size, {"step": 5 * (number // 2)}) for number, size in enumerate(sizes)]
    kept = [line["step"] for line in selected(samples, budget)]
    steps = sorted(set(kept))
    assert {samples[0][1]["step"], samples[-1][1]["step"]} <= set(kept)
    total = sum(size for size, line in samples if line["step"] in steps)
    assert total <= budget or len(steps) <= 2
    assert kept == [line["step"] for _, line in samples if line["step"] in steps]
    if sum(sizes) <= budget:
        assert len(kept) == len(samples)


def test_updates_continue_a_snapshot_until_a_file_is_replaced(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", journal(3), completions(2))
    run = RunData(folder)
    run.update()
    snapshot = run.snapshot()
    positions = {name: snapshot[f"{name}_position"] for name in ("journal", "completions")}
    append(folder / JOURNAL, journal(2, first=4))
    with (folder / JOURNAL).open("a") as file:
        file.write('{"step": 6')
    update = updates(folder, positions)
    added = [json.loads(line) for line in update["journal"]["text"].splitlines()]
    assert [line["step"] for line in added] == [4, 5]
    assert update["completions"]["lines"] == []
    positions = {name: update[name]["position"] for name in positions}
    assert updates(folder, positions)["journal"]["text"] == ""
    with (folder / JOURNAL).open("a") as file:
        file.write(', "loss": 1}\n')
    assert json.loads(updates(folder, positions)["journal"]["text"])["step"] == 6
    # A resumed run writes the file anew, without later steps.
    (folder / "new").write_text("".join(json.dumps(line) + "\n" for line in journal(9)))
    (folder / "new").replace(folder / JOURNAL)
    assert updates(folder, positions) == {"changed": True}
    run.update()
    assert len(decoded(run.snapshot())) == 9
