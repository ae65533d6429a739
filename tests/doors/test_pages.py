"""Snippets of the page about other trainers run, and option names are those of the packages."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, examples
from tests.docs.test_coming_from import names
from tests.doors.conftest import run_python

pytestmark = pytest.mark.doors

PAGE = (PAGES / "other-trainers.md").read_text()
SNIPPETS = [text for _, text in examples("python", "other-trainers.md")]
#: Names in the page's cells that are no options of the package.
OTHERS = {
    "TRL": {"teacher_id"},  # a column
    "verl": {"data_source"},  # a column
}


@pytest.mark.parametrize("place", range(len(SNIPPETS)))
def test_a_snippet_runs(place: int, url: str, student: Path, tmp_path: Path) -> None:
    (tmp_path / "student").symlink_to(student)
    prompts = [{"prompt": [{"role": "user", "content": f"{n} + 4 ="}]} for n in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    text = SNIPPETS[place].replace("http://127.0.0.1:8101", url)
    assert url in text
    # A student of random weights does not end: 2 steps of 8 tokens, without an accelerator.
    text = text.replace("max_steps=100", "max_steps=2, max_completion_length=8, bf16=False")
    (tmp_path / "snippet.py").write_text(text)
    if "import mopd\n" in text:
        run_python(Path(sys.prefix), ["snippet.py"], tmp_path)
        return
    output = run_python("trl", ["snippet.py"], tmp_path)
    if "Trainer" in text:
        [loss] = re.findall(r"'train_loss': '?([\d.e-]+)", output)
        assert float(loss) > 0
    else:
        assert "rank=1" in output or "'rank': 1" in output


@pytest.mark.parametrize(("section", "script"), [("TRL", "trl"), ("verl", "verl")])
def test_options_of_coming_from_exist(
    section: str, script: str, run_script: Callable[..., Any]
) -> None:
    page = (PAGES / "coming-from.md").read_text()
    part = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [left for left, _ in re.findall(r"^\| (.+?) \| (.+) \|$", part, re.M)]
    on_page = {name for cell in cells for name in names(cell)}
    assert len(on_page) > 15
    assert on_page - OTHERS[section] <= set(run_script(script, f"{script}_options.py"))
