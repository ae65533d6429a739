"""``report.html`` shows the metrics of the journal, and completions as text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mopd_protocol.errors import ConfigError, DiskError
from mopd_trainer.reporting.line_chart import HEIGHT, WIDTH, line_chart
from mopd_trainer.reporting.report import write_report
from mopd_trainer.run_folder.journal import COMPLETIONS, JOURNAL

numbers = st.floats(-1e6, 1e6, allow_subnormal=False)


def run_folder(folder: Path, journal: list[dict[str, Any]], completion: str = "4") -> Path:
    folder.mkdir()
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in journal))
    line = {
        "step": 1,
        "prompt": [{"role": "user", "content": "2 + 2 ="}],
        "completion": completion,
        "source": "rollout",
        "finish_reason": "stop",
        "teachers": {"math": 1.0},
    }
    (folder / COMPLETIONS).write_text(json.dumps(line) + "\n")
    return folder


def steps(*losses: float | None, **more: float) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 1.0, "teacher/math/loss": loss, **more}
        for step, loss in enumerate(losses, 1)
    ]


def points(drawing: str) -> list[list[tuple[float, float]]]:
    lines: list[list[tuple[float, float]]] = []
    for text in re.findall(r'points="([^"]*)"', drawing):
        pairs = [pair.split(",") for pair in text.split()]
        lines.append([(float(x), float(y)) for x, y in pairs])
    return lines


@given(values=st.lists(numbers, min_size=2, max_size=20))
@example([0.0, 2.2250738585072014e-308])
def test_curve_is_inside_the_chart_and_monotonic(values: list[float]) -> None:
    (line,) = points(line_chart({"loss": [*enumerate(values, 1)]}))
    assert len(line) == len(values)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    by_value = sorted(zip(values, (y for _, y in line), strict=True))
    assert [y for _, y in by_value] == sorted((y for _, y in line), reverse=True)


def test_missing_value_is_a_gap() -> None:
    curve = [(1, 1.0), (2, 2.0), (3, None), (4, 3.0)]
    assert [len(piece) for piece in points(line_chart({"loss": curve}))] == [2, 2]
    assert line_chart({"loss": [(1, None)]}) == ""
    assert line_chart({}) == ""


def test_every_teacher_has_a_curve_and_a_row(tmp_path: Path) -> None:
    journal = steps(
        0.5, 0.4, **{"teacher/a/b/loss": 0.3, "teacher/a/b/tokens": 7.0, "dropped/x": 2.0}
    )
    page = write_report(run_folder(tmp_path / "run", journal)).read_text()
    chart = page.split("teachers: loss, nats per compared token")[1].split("</figure>")[0]
    assert re.findall("<title>(.*?)</title>", chart) == ["math", "a/b"]
    assert "<td>a/b</td><td>14</td>" in page
    assert "<td>x</td><td>4</td>" in page


def test_completion_is_never_markup(tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>"
    page = write_report(run_folder(tmp_path / "run", steps(0.5), hostile)).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_unicode_line_ends_do_not_split_a_line(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    line = json.loads((run / COMPLETIONS).read_text())
    lines = [{**line, "completion": "\u2028 \x85"}, {**line, "step": 2, "completion": "the last"}]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines)
    (run / COMPLETIONS).write_text(text)
    assert "the last" in write_report(run).read_text()


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5, 0.4))
    with (run / JOURNAL).open("a") as journal:
        journal.write('{"step": 3, "loss": 0.')
    assert "2 steps, up to step 2" in write_report(run).read_text()


@pytest.mark.parametrize("damage", ['{"step": 2, "lo', "5", "{}", "\0\0\0"])
def test_damaged_lines_are_listed_and_skipped(tmp_path: Path, damage: str) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    (completion,) = (run / COMPLETIONS).read_text().splitlines()
    (run / COMPLETIONS).write_text(f"{damage}\n{completion}\n")
    with (run / JOURNAL).open("a") as journal:
        journal.write(f'{damage}\n{{"step": 3, "loss": 0.25}}\n')
    page = write_report(run).read_text()
    assert "2 steps, up to step 3" in page
    assert "journal.jsonl:2, completions.jsonl:1." in page
    assert "2 + 2 =" in page


def test_failed_write_is_reported(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    (run / "report.html").mkdir()
    with pytest.raises(DiskError) as caught:
        write_report(run)
    assert caught.value.key == str(run / "report.html")


def test_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_report(tmp_path)
    assert caught.value.key == str(tmp_path)
    assert not [*tmp_path.iterdir()]
