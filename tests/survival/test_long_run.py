"""A run of thousands of steps: neither the trainer nor its teachers grow."""

import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes, tiny_models
from tests.processes import Program
from tests.survival.running_teacher import running_teacher
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.students import model_of, tokenizer

logger = logging.getLogger(__name__)

#: Steps after which memory is compared; the caches are full of a run's texts by the first.
STEPS = (500, 1000, 2000)
#: Growth from the first to the last of these steps.
LIMIT = 1.03


def resident_mebibytes(process: int) -> float:
    """The resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def steps_of(run: Program, journal: Path) -> Iterator[int]:
    """The steps of a run as they are written to its journal."""
    written = 0
    while run.poll() is None:
        if journal.exists():
            lines = journal.read_bytes()[written:]
            complete = lines[: lines.rfind(b"\n") + 1]
            written += len(complete)
            yield from (json.loads(line)["step"] for line in complete.splitlines())
        threading.Event().wait(0.05)  # poll: the run is another process


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.timeout(7200)
def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    for name, family, own in (
        ("student", "qwen", "digit"),
        ("math", "qwen", "digit"),
        ("code", "llama", "sentencepiece"),
    ):
        tiny_models.save(model_of(family, seed=len(name)), tokenizer(own), tmp_path / name)
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(64))
    with (
        running_teacher(tmp_path / "math", tmp_path / "math.log", name="math") as math,
        running_teacher(tmp_path / "code", tmp_path / "code.log", name="code") as code,
    ):
        values = run_values(tmp_path, max_steps=STEPS[-1], save_steps=250)
        for teacher in (math, code):
            name = "math" if teacher is math else "code"
            values["teachers"][name] = {"url": teacher.url, "top_k": 8}
        values["rollout"] |= {"prompts_per_step": 16, "max_new_tokens": 16, "max_staleness": 1}
        values["student"]["learning_rate"] = 1e-5
        run = processes.start(
            "mopd",
            "train",
            write_run(tmp_path, values),
            stdout=tmp_path / "out",
            stderr=tmp_path / "error",
        )
        watched = {"trainer": run.pid, "math": math.process.pid, "code": code.process.pid}
        memory: dict[int, dict[str, float]] = {}
        try:
            for step in steps_of(run, tmp_path / "run" / "journal.jsonl"):
                if step in STEPS:
                    memory[step] = {name: resident_mebibytes(pid) for name, pid in watched.items()}
                    text = ", ".join(f"{name} {size:.0f}" for name, size in memory[step].items())
                    logger.info("resident MiB at step %d: %s", step, text)
            assert run.wait() == 0, (tmp_path / "error").read_text()
        finally:
            run.kill()
    for name in watched:
        assert memory[STEPS[-1]][name] <= LIMIT * memory[STEPS[0]][name], memory
