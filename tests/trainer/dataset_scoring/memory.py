"""Resident memory of scoring tiny rows: ``python -m tests.trainer.dataset_scoring.memory ROWS``."""

import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from mopd_trainer.dataset_scoring.requests import count_rows
from tests.trainer.dataset_scoring.fake_teacher import FakeTeacher, job_of, score


class ForgetfulTeacher(FakeTeacher):
    """A teacher that does not keep what it was sent."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, [] if name == "sent" else value)


def peak_bytes(rows: int, folder: Path) -> int:
    """Score distinct rows, of which every tenth is repeated; return the process's peak."""
    path = folder / "data.jsonl"
    with path.open("w") as file:
        for row in range(rows):
            at = row - 1 if row % 10 == 9 else row
            file.write(json.dumps({"prompt": f"{at} + 1 =", "completion": f"{at + 1}"}) + "\n")
    job = job_of(path, folder / "scores")
    assert count_rows(job) == rows
    done = asyncio.run(score(job, ForgetfulTeacher(), concurrency=8))
    assert done.rows == rows and done.scored == rows - rows // 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    started = time.perf_counter()
    with TemporaryDirectory() as temporary:
        peak = peak_bytes(int(sys.argv[1]), Path(temporary))
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{sys.argv[1]} rows: {peak / 2**20:.1f} MiB, {seconds:.0f} s\n")
