"""Resident memory of scoring tiny rows: ``python -m tests.trainer.dataset_scoring.memory ROWS``."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mopd_protocol.requests import SequenceRequest
from mopd_trainer.dataset_scoring.requests import count_rows
from tests.trainer.dataset_scoring.fake_teacher import FakeTeacher, job_of, score

SCORE = FakeTeacher().score_of(SequenceRequest(prompt="1 + 1 =", completion="2"), 4)


class FastTeacher(FakeTeacher):
    """A teacher with one score, without a list of requests."""

    async def score(self, sequences: Sequence[SequenceRequest], **options: Any) -> Any:
        return [SCORE] * len(sequences)


def peak_bytes(rows: int, folder: Path) -> int:
    """Score distinct rows, of which every tenth is repeated; return the process's peak."""
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for row in range(rows):
            at = row - 1 if row % 10 == 9 else row
            file.write(json.dumps({"prompt": f"{at} + 1 =", "completion": f"{at + 1}"}) + "\n")
    job = job_of(path, folder / "scores")
    assert count_rows(job) == rows
    done = asyncio.run(score(job, FastTeacher(), concurrency=8))
    assert done.rows == rows
    assert done.scored == rows - rows // 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    started = time.perf_counter()
    with TemporaryDirectory() as temporary:
        peak = peak_bytes(int(sys.argv[1]), Path(temporary))
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{sys.argv[1]} rows: {peak / 2**20:.1f} MiB, {seconds:.0f} s\n")
