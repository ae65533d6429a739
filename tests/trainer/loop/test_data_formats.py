"""Runs of two steps on every format of data, from every kind of file."""

import asyncio
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.preflight import check_run
from tests.trainer.data.test_formats import ROWS, write
from tests.trainer.runs import run_values
from tests.trainer.whole_runs import journal, run_here

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("source", ["rollout", "answers"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved", "dataset"])
def test_every_format_is_checked_and_trains(
    tmp_path: Path, models: dict[str, Path], addresses: dict[str, str], kind: str, source: str
) -> None:
    # The first row of each format, from JSONL; from the other files, of one.
    rows = {name: (row, settings) for name, row, settings in reversed(ROWS)}
    for number, (name, (row, settings)) in enumerate(rows.items()):
        if kind != "jsonl" and name != "messages":
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        values: dict[str, Any] = run_values(folder, logging={"tensorboard": False})
        values["data"] = {**write(folder, kind, [row] * 4), **settings, "source": source}
        values["data"]["prompts"] = str(values["data"]["prompts"])
        values["student"]["model"] = str(models["student"])
        values["teachers"] = {"math": {"url": addresses["math"], "top_k": 8}}
        output = StringIO()
        config = RunConfig.model_validate(values)
        asyncio.run(check_run(config, Console(file=output, width=1_000)))
        assert f"4 of format {name}" in output.getvalue()
        run_here(values)
        lines = journal(folder / "run")
        assert [line["step"] for line in lines] == [1, 2]
        assert all(math.isfinite(line["loss"]) for line in lines)
        assert lines[-1]["tokens/trained"] > 0
