"""``RunData``: a run folder as data of a page: columns of metrics, and logged completions."""

import json
import re
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_trainer.metrics.table import metric_row
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL

Line = dict[str, Any]

#: Completions on a page, in bytes of ``completions.jsonl``; more delay the first paint.
COMPLETION_BYTES = 4_000_000
#: Maximum size of an update.
_UPDATE_BYTES = 4_000_000
_LISTED_DAMAGE = 4


@dataclass
class LineFile:
    """A file of JSON lines that grows; a file that was replaced or truncated starts again."""

    path: Path
    file: int = 0  # inode
    end: int = 0  # of the complete lines that were read
    number: int = 0  # of the last line
    damaged: list[str] = field(default_factory=list[str])
    """``file:line`` of lines that are not JSON with a step."""

    def position(self) -> list[int]:
        """Return the file and the end of the lines that were read."""
        return [self.file, self.end]

    def is_replaced(self) -> bool:
        """Return True if what was read is not the start of the file any more."""
        if not self.path.is_file():
            return self.file != 0
        status = self.path.stat()
        return status.st_ino != (self.file or status.st_ino) or status.st_size < self.end

    def read(self, limit: int | None = None) -> bytes:
        """Return further complete lines, up to ``limit`` bytes or one line."""
        if not self.path.is_file():
            return b""
        with self.path.open("rb") as opened:
            opened.seek(self.end)
            content = opened.read() if limit is None else opened.read(limit)
            if limit is not None and b"\n" not in content:
                content += opened.readline()
            self.file = self.path.stat().st_ino
        content = content[: content.rfind(b"\n") + 1]
        self.end += len(content)
        return content

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield further lines with their sizes; damaged ones are listed instead."""
        # Not splitlines: a completion may contain line ends of text that are none of JSONL.
        for text in self.read().split(b"\n")[:-1]:
            self.number += 1
            try:
                line: Any = json.loads(text.decode("utf-8", "replace"))
            except ValueError:
                line = None
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield len(text), line
            else:
                self.damaged.append(f"{self.path.name}:{self.number}")


class RunData:
    """The files of a run folder; ``update`` reads what was appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reset()

    def _reset(self) -> None:
        self._journal = LineFile(self.folder / JOURNAL)
        self._completions = LineFile(self.folder / COMPLETIONS)
        self._steps = array("f")
        self._columns: dict[str, array[float]] = {}
        self._samples: list[tuple[int, Line]] = []

    def update(self) -> None:
        """Read the files, from the start if one was replaced."""
        if self._journal.is_replaced() or self._completions.is_replaced():
            self._reset()
        for _, line in self._journal.lines():
            self._add(line)
        self._samples += self._completions.lines()

    @property
    def steps(self) -> int:
        """Number of steps with metrics."""
        return len(self._steps)

    def snapshot(self) -> dict[str, Any]:
        """Return all metrics and a selection of the completions as JSON values."""
        chosen = selected(self._samples, COMPLETION_BYTES)
        config = self.folder / "config.yaml"
        text = config.read_text(encoding="utf-8") if config.is_file() else ""
        most = re.search(r"^max_steps: (\d+)", text, re.MULTILINE)
        damaged = [*self._journal.damaged, *self._completions.damaged]
        return {
            "folder": str(self.folder),
            "config": text,
            "max_steps": int(most[1]) if most else None,
            "steps": _base64(self._steps, "<f4"),
            "columns": {key: self._encoded(column) for key, column in self._columns.items()},
            "completions": chosen,
            "logged_completions": len(self._samples),
            "journal_position": self._journal.position(),
            "completions_position": self._completions.position(),
            "damaged": damaged[:_LISTED_DAMAGE],
            "damaged_lines": len(damaged),
        }

    def metrics(self) -> dict[str, tuple[str, str]]:
        """Return unit and meaning of each metric of the run that is in the table of metrics."""
        rows = {key: metric_row(key) for key in self._columns}
        return {key: (row.unit, row.meaning) for key, row in rows.items() if row is not None}

    def _add(self, line: Line) -> None:
        """Add a line; lines of one step are merged."""
        step = float(line.pop("step"))
        if not self._steps or self._steps[-1] != step:
            self._steps.append(step)
        last = len(self._steps) - 1
        for key, value in line.items():
            if isinstance(value, int | float) and value == value:
                column = self._columns.get(key)
                if column is None:
                    column = self._columns[key] = array("f")
                _extend(column, last)
                column[last:] = array("f", [value])

    def _encoded(self, column: "array[float]") -> list[str]:
        """Return ``[values]``, or ``[rows, values]`` of a column that is mostly empty."""
        _extend(column, len(self._steps))
        values = np.frombuffer(column, dtype=np.float32)
        rows = np.flatnonzero(~np.isnan(values))
        if len(rows) * 3 < len(values):
            return [_base64(rows, "<i4"), _base64(values[rows], "<f4")]
        return [_base64(values, "<f4")]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that differ, at least the last part."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def updates(folder: Path, positions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the lines after the positions of a ``snapshot``, as text, with new positions.

    Returns ``{"changed": True}`` if a file was replaced, for example by a resumed run.

    Args:
        positions: of ``journal`` and ``completions``: inode and offset.
    """
    result: dict[str, Any] = {}
    for name, path in (("journal", folder / JOURNAL), ("completions", folder / COMPLETIONS)):
        inode, end = positions[name]
        file = LineFile(path, inode, end)
        if file.is_replaced():
            return {"changed": True}
        text = file.read(_UPDATE_BYTES).decode("utf-8", "replace")
        result[name] = {"text": text, "position": file.position()}
    return result


def selected(samples: Sequence[tuple[int, Line]], budget: int) -> list[Line]:
    """Return the completions of as many steps as have room, evenly spaced, with first and last."""
    steps = list(dict.fromkeys(line["step"] for _, line in samples))
    every = 1
    while True:
        kept = {*steps[::every], *steps[-1:]}
        chosen = [(size, line) for size, line in samples if line["step"] in kept]
        if sum(size for size, _ in chosen) <= budget or len(kept) <= 2:
            return [line for _, line in chosen]
        every *= 2


def _extend(column: "array[float]", length: int) -> None:
    column.extend([nan] * (length - len(column)))


def _base64(values: "array[float] | NDArray[Any]", dtype: str) -> str:
    return b64encode(np.asarray(values).astype(dtype).tobytes()).decode()
