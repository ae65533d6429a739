"""``report.html``: curves, timings, teachers and completions of one or two runs on one page."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd_protocol.errors import ConfigError, DiskError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.pages.document import document
from mopd_trainer.pages.run_data import RunData, run_names
from mopd_trainer.run_folder.files import JOURNAL

logger = logging.getLogger(__name__)

REPORT = "report.html"


def write_report(run: Path, compared: Path | None = None, output: Path | None = None) -> Path:
    """Write the page of a run, completely or not at all; return its path.

    Args:
        compared: folder of a second run, side by side with the first.
        output: default: ``report.html`` in the run folder.

    Raises:
        ConfigError: if a folder has no journal.
        DiskError: if writing fails.
    """
    folders = [run] if compared is None else [run, compared]
    data = [RunData(folder) for folder in folders]
    for each in data:
        each.update()
        if not each.steps:
            raise ConfigError(
                f"{each.folder}: no {JOURNAL} with a finished step found, expected the output_dir "
                "of a run",
                key=str(each.folder),
            )
        if each.damaged:
            logger.warning(
                "%s: damaged lines are not shown (found %d, the first is %s)",
                each.folder,
                len(each.damaged),
                each.damaged[0],
            )
    page = document("run", page_title(folders), page_data(data))
    return write_page(page, output or run / REPORT)


def page_title(folders: Sequence[Path]) -> str:
    """Return the title of a page."""
    return " and ".join(run_names(folders)) + " - mopd"


def page_data(runs: Sequence[RunData], *, live: bool = False) -> dict[str, Any]:
    """Return the data of a page.

    Args:
        live: the page requests updates of its server.
    """
    metrics = {key: row for run in runs for key, row in run.metrics().items()}
    names = run_names([run.folder for run in runs])
    snapshots = [{"name": n, **run.snapshot()} for n, run in zip(names, runs, strict=True)]
    return {"live": live, "metrics": metrics, "runs": snapshots}


def write_page(page: str, path: Path) -> Path:
    """Write a page, completely or not at all; return its path.

    Raises:
        DiskError: if writing fails.
    """
    try:
        with replacing(path.absolute()) as unfinished:  # "." has no name
            unfinished.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DiskError(
            f"{path}: writing failed: {error.strerror or error}. Other files are unchanged.",
            key=str(path),
        ) from error
    return path
