"""``RunData``: a run folder as data of a page: columns of metrics, and logged completions."""

import json
import re
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mopd_trainer.metrics.table import metric_row
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL

Line = dict[str, Any]

#: Completions on a page, in bytes of JSON; more delay the first paint.
COMPLETION_BYTES = 4_000_000
#: Maximum size of an update.
_UPDATE_BYTES = 4_000_000
_LISTED_DAMAGE = 4
#: Larger numbers are damage: of steps, and of metrics, which are stored in float32.
_LARGEST_STEP, _LARGEST_VALUE = 2**53, 3e38
#: Summary of a completion: characters of each text, and losses of each teacher.
_SUMMARY_TEXT, _SUMMARY_LOSSES = 500, 16


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

    def lines(self, limit: int | None = None) -> Iterator[tuple[int, int, Line]]:
        """Yield further lines with start and size; damaged ones are listed instead."""
        end = self.end
        # Not splitlines: a completion may contain line ends of text that are none of JSONL.
        for text in self.read(limit).split(b"\n")[:-1]:
            start, end = end, end + len(text) + 1
            self.number += 1
            try:
                line: Any = json.loads(text.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                line = None
            step = cast("Line", line).get("step") if isinstance(line, dict) else None
            if type(step) is int and abs(step) < _LARGEST_STEP:
                yield start, len(text), cast("Line", line)
            else:
                self._add_damage()

    def summaries(self, limit: int | None = None) -> Iterator[tuple[int, Line, Line]]:
        """Yield further completions with size and ``summary``, as ``lines``."""
        for start, size, line in self.lines(limit):
            try:
                short = summary(line, start)
            except (AttributeError, LookupError, TypeError, ValueError):
                self._add_damage()
            else:
                yield size, line, short

    def _add_damage(self) -> None:
        self.damaged.append(f"{self.path.name}:{self.number}")


class RunData:
    """The files of a run folder; ``update`` reads what was appended.

    Args:
        live: keep a ``summary`` of each completion; pages request the shown ones.
    """

    def __init__(self, folder: Path, *, live: bool = False) -> None:
        self.folder = folder
        self._live = live
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
        for _, _, line in self._journal.lines():
            self._add(line)
        for size, line, short in self._completions.summaries():
            if self._live:
                line, size = short, len(json.dumps(short, ensure_ascii=False))
            self._samples.append((size, line))

    @property
    def steps(self) -> int:
        """Number of steps with metrics."""
        return len(self._steps)

    @property
    def damaged(self) -> list[str]:
        """``file:line`` of the lines that are not shown."""
        return [*self._journal.damaged, *self._completions.damaged]

    def snapshot(self) -> dict[str, Any]:
        """Return all metrics and a selection of the completions as JSON values."""
        chosen = selected(self._samples, COMPLETION_BYTES)
        config = self.folder / "config.yaml"
        text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
        most = re.search(r"^max_steps: (\d+)", text, re.MULTILINE)
        damaged = self.damaged
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
            if isinstance(value, int | float) and value == value and abs(value) <= _LARGEST_VALUE:
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
    """Return what follows the positions of a ``snapshot``, with new positions: the text of the
    journal's lines, and a ``summary`` of each completion.

    Returns ``{"changed": True}`` if a file was replaced, for example by a resumed run.

    Args:
        positions: of ``journal`` and ``completions``: inode and offset.
    """
    files: list[LineFile] = []
    for name, path in (("journal", JOURNAL), ("completions", COMPLETIONS)):
        inode, offset = positions[name]
        files.append(LineFile(folder / path, inode, offset))
    if any(file.is_replaced() for file in files):
        return {"changed": True}
    journal, completions = files
    text = journal.read(_UPDATE_BYTES).decode("utf-8", "replace")
    lines = [short for _, _, short in completions.summaries(_UPDATE_BYTES)]
    return {
        "journal": {"text": text, "position": journal.position()},
        "completions": {"lines": lines, "position": completions.position()},
    }


def summary(line: Line, start: int) -> Line:
    """Return what a list shows of a logged completion, with the start of its line in the file."""
    nats = {
        name: [each for each in values if each is not None]
        for name, values in line.get("nats", {}).items()
    }
    return {
        **{key: line.get(key) for key in ("step", "source", "teachers", "finish_reason")},
        "start": start,
        "prompt": [
            {**message, "content": message["content"][:_SUMMARY_TEXT]}
            for message in line.get("prompt", ())
        ],
        "completion": line.get("completion", "")[:_SUMMARY_TEXT],
        "count": line.get("tokens", {}).get("count", 0),
        "means": {name: fmean(values) for name, values in nats.items() if values},
        # Evenly spaced, for the scale of the colours.
        "nats": {
            name: values[:: -(-len(values) // _SUMMARY_LOSSES) or 1]
            for name, values in nats.items()
        },
    }


def logged_line(folder: Path, start: int) -> Line:
    """Return the completion whose line starts at a byte.

    Raises:
        ValueError: if no line with a step starts at it.
    """
    path, line, before = folder / COMPLETIONS, None, b""
    if path.is_file() and start >= 0:
        with path.open("rb") as opened:
            opened.seek(max(start - 1, 0))
            before = opened.read(1) if start else b"\n"
            line = json.loads(opened.readline().decode("utf-8", "replace") or "null")
    if before != b"\n" or not isinstance(line, dict) or "step" not in line:
        raise ValueError(f"start: not that of a line (found {start})")
    return cast("Line", line)


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
