"""``Journal``: a line of JSON a step, and the same numbers for TensorBoard."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from mopd_protocol.errors import DataError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.metrics.token_losses import TokenLosses, rounded
from mopd_trainer.run_folder.disk_errors import append_whole
from mopd_trainer.run_folder.trackers import Tracker

JOURNAL = "journal.jsonl"
COMPLETIONS = "completions.jsonl"
#: Of a completion, one by one; all of its text is there.
_TOKENS_TOLD = 512


class Journal:
    """Writes what happened. Opened at step ``from_step``, it forgets all later steps first.

    A run that was killed after its last checkpoint redoes those steps, and the journal then has
    neither a gap nor a repeat.

    Raises:
        DataError: when a line that is there is damaged, and not by being the last one.
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
            _forget_after(output_dir / name, from_step)
        # Unbuffered: what could not be written is taken back, and not tried again at the end.
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
        """A step's numbers; steps count from 1. What was not measured is ``null``.

        Raises:
            DataError: when the disk takes no more; the journal is then as before.
        """
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._append(self._journal, {"step": step, **values}, durable=True)
        measured = {key: value for key, value in values.items() if value is not None}
        if self._tensorboard is not None:
            for key, value in measured.items():
                self._tensorboard.add_scalar(key, value, step)
        for tracker in self._trackers:
            tracker.log(step, measured)

    def write_completion(
        self,
        step: int,
        example: TrainingExample,
        losses: Mapping[str, TokenLosses | None] = MappingProxyType({}),
    ) -> None:
        """A completion for people to read; bytes that are no text are shown as U+FFFD.

        Its first 512 tokens are there one by one too: their ids, their bytes in hexadecimal (a
        token may end inside a character), and what each cost, in nats before any weight, by each
        teacher that judged it; ``null`` where that one was not compared with the student. These
        take about 20 bytes a token, and 8 a teacher.

        Args:
            losses: by the names of teachers.

        Raises:
            DataError: when the disk takes no more; the file is then as before.
        """
        rollout = example.rollout
        line = {
            "step": step,
            "prompt": [message.model_dump() for message in rollout.prompt.messages],
            "completion": rollout.completion.text.decode("utf-8", "replace"),
            "source": rollout.source,
            "policy_version": rollout.policy_version,
            "finish_reason": rollout.finish_reason,
            "teachers": dict(rollout.prompt.teachers),
            "metadata": dict(rollout.prompt.metadata),
            "tokens": _tokens(rollout.completion),
            "nats": {
                name: rounded(nats[:_TOKENS_TOLD])
                for name, nats in losses.items()
                if nats is not None
            },
        }
        self._append(self._completions, line, durable=False)

    def settle(self) -> None:
        """Everything that was written is on the disk when this returns."""
        os.fsync(self._completions.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Closes the files."""
        self._journal.close()
        self._completions.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for tracker in self._trackers:
            tracker.close()

    def _append(self, file: FileIO, line: dict[str, Any], *, durable: bool) -> None:
        text = json.dumps(line, ensure_ascii=False, default=str) + "\n"
        append_whole(file, text.encode("utf-8", "replace"), path=Path(file.name), durable=durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tokens(completion: TokenSequence) -> dict[str, Any]:
    text, ends = completion.text, completion.byte_ends[:_TOKENS_TOLD].tolist()
    return {
        "count": len(completion),
        "ids": completion.token_ids[:_TOKENS_TOLD].tolist(),
        "bytes": [text[start:end].hex() for start, end in pairwise([0, *ends])],
        "marks": {
            str(position): name
            for position, name in completion.marks.items()
            if position < _TOKENS_TOLD
        },
    }


def _forget_after(path: Path, step: int) -> None:
    """Keeps the lines up to ``step``; a last line that was cut short by a kill goes too."""
    if not path.exists():
        return
    # Bytes: a kill can cut a character in two, and text has more line ends (U+2028) than JSONL.
    whole = [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]
    kept = [
        line for number, line in enumerate(whole, 1) if _step_of(line, f"{path}:{number}") <= step
    ]
    with replacing(path, durable=True) as temporary:
        temporary.write_bytes(b"".join(kept))


def _step_of(line: bytes, where: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{where} is damaged ({type(error).__name__}: {error}); expected a step's line as the "
            "run wrote it: remove this line to go on without it"
        ) from error
