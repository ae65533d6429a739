"""The nightly script, at its smallest: every pairing is run, and has its line in the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pairings import PAIRINGS
from tests.cookbook.recipes import COOKBOOK

pytestmark = pytest.mark.slow


def test_every_pairing_runs_and_is_reported(tmp_path: Path) -> None:
    environment = {"PYTHON": sys.executable, "OUTPUT_DIR": str(tmp_path), "STEPS": "2"}
    ended = subprocess.run(
        [COOKBOOK / "two_families_cpu.sh", "--model-steps", "2", "--exercises", "8"],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment},
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [line["pairing"] for line in summary["pairings"]] == [each.name for each in PAIRINGS]
    for number, line in enumerate(summary["pairings"], start=1):
        assert f"{number}/{len(PAIRINGS)} {line['pairing']}" in ended.stdout
        assert f"{line['tokens']:,}" in ended.stdout
        assert line["tokens"] > 2 * 32
        assert line["loss"] > 0
        assert 0 <= line["accuracy_after"] <= 1
    folders = [path.name for path in (tmp_path / "distillation").iterdir()]
    assert len(folders) == len(PAIRINGS)
    both = tmp_path / "distillation" / "two-on-one-sample" / "journal.jsonl"
    lines = map(json.loads, both.read_text().splitlines())
    first = next(line for line in lines if "loss" in line)
    assert first["teacher/own/token_fraction"] == pytest.approx(0.5)
    assert first["teacher/other/token_fraction"] == pytest.approx(0.5)
