"""``Journal``: one line of JSON per step, and the same metrics for TensorBoard and trackers."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mopd_protocol.errors import CheckpointError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.run_folder.disk_errors import append_line
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from mopd_trainer.run_folder.trackers import Tracker


class Journal:
    """Log of a run. Opening it at step ``from_step`` removes all later steps.

    A run that was killed after its last checkpoint repeats those steps; the journal then has
    neither gaps nor duplicates.

    Raises:
        CheckpointError: if a line other than the last is damaged; ``key`` is ``file:line``.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        from_step: int,
        tensorboard: bool,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name in (JOURNAL, COMPLETIONS):
            _truncate_after(output_dir / name, from_step)
        # Unbuffered: a failed write is undone, and not repeated when the file is closed.
        self._journal = (output_dir / JOURNAL).open("ab", buffering=0)
        self._completions = (output_dir / COMPLETIONS).open("ab", buffering=0)
        self._trackers = trackers
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import, so only on use

            self._tensorboard = SummaryWriter(
                str(output_dir / "tensorboard"), purge_step=from_step + 1
            )

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step (from 1); a metric that was not measured is ``null``.

        Raises:
            DiskError: if writing fails; the journal is unchanged.
        """
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._append(self._journal, {"step": step, **values}, durable=True)
        measured = {key: value for key, value in values.items() if value is not None}
        if self._tensorboard is not None:
            for key, value in measured.items():
                self._tensorboard.add_scalar(key, value, step)
        for tracker in self._trackers:
            tracker.log(step, measured)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the lines with metrics of an evaluation."""
        lines = Path(self._journal.name).read_bytes().splitlines()
        return [json.loads(line) for line in lines if b'"evaluation/' in line]

    def write_completions(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write completions of a step for the report: see ``logged_completion``.

        Raises:
            DiskError: if writing fails; only complete lines remain.
        """
        for line in lines:
            self._append(self._completions, line, durable=False)
        for tracker in self._trackers if lines else ():
            tracker.log_completions(lines)

    def settle(self) -> None:
        """Synchronise all files with the disk."""
        os.fsync(self._completions.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Close the files and finish the trackers."""
        self._journal.close()
        self._completions.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for tracker in self._trackers:
            tracker.close()

    def _append(self, file: FileIO, line: Mapping[str, Any], *, durable: bool) -> None:
        text = json.dumps(line, ensure_ascii=False, default=str) + "\n"
        append_line(file, text.encode("utf-8", "replace"), path=Path(file.name), durable=durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def past_metrics(output_dir: Path, steps: int) -> Iterator[tuple[int, Metrics]]:
    """Yield the first steps (from 1) of a run's journal; NaN for what was not measured."""
    path = output_dir / JOURNAL
    with path.open(encoding="utf-8") if path.is_file() else nullcontext([]) as lines:
        for line in lines:
            values: dict[str, float | None] = json.loads(line)
            step = values.pop("step")
            if step is not None and step <= steps:
                yield int(step), {k: math.nan if v is None else v for k, v in values.items()}


def _truncate_after(path: Path, step: int) -> None:
    """Remove lines after ``step``, and an incomplete last line."""
    if not path.exists():
        return
    # Bytes: a kill can split a character, and text has more line ends (U+2028) than JSONL.
    lines = [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]
    kept = [
        line for number, line in enumerate(lines, 1) if _step_of(line, f"{path}:{number}") <= step
    ]
    with replacing(path, durable=True) as temporary:
        temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: damaged line ({type(error).__name__}: {error}), expected JSON with a step. "
            "Remove the line to resume without it.",
            key=where,
        ) from error
