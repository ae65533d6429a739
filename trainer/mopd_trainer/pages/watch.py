"""``watch_server``: the page of one or two runs, which shows new steps as they are written."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mopd_protocol.errors import ConfigError
from mopd_trainer.pages.document import document
from mopd_trainer.pages.report import page_data, page_title
from mopd_trainer.pages.run_data import RunData, logged_line, updates
from mopd_trainer.pages.server import PageServer
from mopd_trainer.run_folder.files import JOURNAL


def watch_server(folders: Sequence[Path], *, host: str, port: int) -> PageServer:
    """Return the server of a page; a run without a finished step is waited for.

    Raises:
        ConfigError: if a folder does not exist, or the address is not available.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: not found, expected the output_dir of a run", key=str(folder)
            )
    runs = [RunData(folder, live=True) for folder in folders]
    lock = Lock()

    def page() -> str:
        with lock:
            for run in runs:
                run.update()
            return document("run", page_title(folders), page_data(runs, live=True), served=True)

    def update(parameters: Mapping[str, Any]) -> dict[str, Any]:
        folder = folders[int(parameters["run"])]
        positions = {
            name: [int(part) for part in parameters[name].split(":")]
            for name in ("journal", "completions")
        }
        journal = folder / JOURNAL
        age = time.time() - journal.stat().st_mtime if journal.is_file() else None
        return {"age": age, **updates(folder, positions)}

    def completion(parameters: Mapping[str, Any]) -> dict[str, Any]:
        return logged_line(folders[int(parameters["run"])], int(parameters["start"]))

    routes = {"updates": update, "completion": completion}
    return PageServer(page, routes, host=host, port=port)
