"""``report.html`` tells what the journal tells, and shows completions as text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mopd_protocol.errors import ConfigError, DataError
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
        {"step": step, "loss": 1.0, "teacher/math/loss_per_token": loss, **more}
        for step, loss in enumerate(losses, 1)
    ]


def points(drawing: str) -> list[list[tuple[float, float]]]:
    found: list[list[tuple[float, float]]] = []
    for text in re.findall(r'points="([^"]*)"', drawing):
        pairs = [pair.split(",") for pair in text.split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


@given(values=st.lists(numbers, min_size=2, max_size=20))
@example([0.0, 2.2250738585072014e-308])
def test_a_curve_is_in_its_box_and_higher_values_are_higher(values: list[float]) -> None:
    (line,) = points(line_chart({"loss": [*enumerate(values, 1)]}))
    assert len(line) == len(values)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in line)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    by_value = sorted(zip(values, (y for _, y in line), strict=True))
    assert [y for _, y in by_value] == sorted((y for _, y in line), reverse=True)


def test_what_was_not_measured_is_a_gap() -> None:
    curve = [(1, 1.0), (2, 2.0), (3, None), (4, 3.0)]
    assert [len(piece) for piece in points(line_chart({"loss": curve}))] == [2, 2]
    assert line_chart({"loss": [(1, None)]}) == ""
    assert line_chart({}) == ""


def test_every_teacher_has_its_curve_and_its_row(tmp_path: Path) -> None:
    journal = steps(
        0.5, 0.4, **{"teacher/a/b/loss_per_token": 0.3, "teacher/a/b/tokens": 7.0, "dropped/x": 2.0}
    )
    page = write_report(run_folder(tmp_path / "run", journal)).read_text()
    drawn = page.split("teachers: loss, nats a token")[1].split("</figure>")[0]
    assert re.findall("<title>(.*?)</title>", drawn) == ["math", "a/b"]
    assert "<td>a/b</td><td>14</td>" in page
    assert "<td>x</td><td>4</td>" in page


def test_what_a_student_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>"
    page = write_report(run_folder(tmp_path / "run", steps(0.5), hostile)).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_what_ends_a_line_of_text_ends_none_of_the_file(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    line = json.loads((run / COMPLETIONS).read_text())
    lines = [{**line, "completion": "\u2028 \x85"}, {**line, "step": 2, "completion": "the last"}]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines)
    (run / COMPLETIONS).write_text(text)
    assert "the last" in write_report(run).read_text()


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5, 0.4))
    with (run / JOURNAL).open("a") as journal:
        journal.write('{"step": 3, "loss": 0.')
    assert "2 steps, the last one is 2" in write_report(run).read_text()


@pytest.mark.parametrize("damage", ['{"step": 2, "lo', "5", "{}", "\0\0\0"])
def test_a_damaged_line_is_told_and_hides_none_after_it(tmp_path: Path, damage: str) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    (completion,) = (run / COMPLETIONS).read_text().splitlines()
    (run / COMPLETIONS).write_text(f"{damage}\n{completion}\n")
    with (run / JOURNAL).open("a") as journal:
        journal.write(f'{damage}\n{{"step": 3, "loss": 0.25}}\n')
    page = write_report(run).read_text()
    assert "2 steps, the last one is 3" in page
    assert "Damaged and left out: journal.jsonl:2, completions.jsonl:1." in page
    assert "2 + 2 =" in page


def test_a_page_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps(0.5))
    (run / "report.html").mkdir()
    with pytest.raises(DataError, match=r"report\.html cannot be written: Is a directory"):
        write_report(run)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the output_dir of a run"):
        write_report(tmp_path)
    assert not [*tmp_path.iterdir()]
