"""Seconds of a training step by phase, and the hidden share of its teacher's time.

    python -m bench.pipeline --json pipeline.json          minutes on two cores
    python -m bench.pipeline --vllm --json pipeline.json   also with vLLM as the rollout engine

Complete runs of ``mopd train`` on a tiny student, with a teacher in a separate process, one thread
each. The number of the teacher's layers is calibrated first, so that scoring a step's completions
takes as long as sampling them; the ratio in the sequential runs is reported.

* sequential: completions are scored after the rollout (``scoring: after_rollout``)
* streaming: finished completions are scored during the rollout (``scoring: stream``)
* ahead: streaming, and the next step is sampled during training (``max_staleness: 1``)

All ways take turns within each round, so that a noisy minute affects all of them. The first step of
a run (warm-up) and the last (which has no next step) are not counted. The share of scoring that is
hidden behind sampling is 1 - wait / score. Figures are medians over all counted steps.
"""

import argparse
import json
import logging
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bench.small_teacher import make_small_teacher
from mopd.demo.services import teacher_services
from mopd_trainer import RunConfig, train

WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"scoring": "after_rollout"},
    "streaming": {"scoring": "stream"},
    "ahead": {"scoring": "stream", "max_staleness": 1},
}
PHASES = ("sample", "score", "wait", "train", "push", "step")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
VOCABULARY = 2048
TEACHER_HIDDEN = 128
MOST_LAYERS = 400
#: Relative gap of teacher and student seconds at which calibration stops.
CLOSE_ENOUGH = 0.1
CALIBRATIONS = 4
HIDDEN_BAR = 0.9


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    steps: int
    prompts_per_step: int
    generation_batch_size: int
    max_new_tokens: int


@dataclass
class Measured:
    """Measurements of one way: seconds of each phase and hidden share, for each counted step."""

    engine: str
    way: str
    seconds: dict[str, list[float]]
    hidden: list[float]
    tokens_per_second: list[float]

    def median(self, phase: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.seconds[phase])


def main() -> None:
    """Calibrate, measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of a run (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=96, help="a step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="generation batch (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="a completion (%(default)s)")
    parser.add_argument(
        "--vllm", action="store_true", help="also with the vLLM rollout engine (make vllm)"
    )
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps: expected at least 3, as the first and the last are not counted")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    size = Size(options.steps, options.prompts, options.batch, options.tokens)
    console = Console()
    engines = ["transformers", *(["vllm"] if options.vllm else [])]
    all_measured: list[Measured] = []
    with TemporaryDirectory(prefix="mopd-bench-") as temporary:
        folder = Path(temporary)
        _make_model(folder / "student", layers=2, hidden=64)
        _write_prompts(folder / "prompts.jsonl", size)
        for engine in engines:
            layers = _calibrate(folder, size, engine, console)
            console.print(f"{engine}: the teacher has {layers} layers")
            all_measured += _measure(folder, size, engine, options.rounds, console)
    _print(all_measured, console)
    if options.json:
        report = {
            "size": asdict(size),
            "rounds": options.rounds,
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "teacher_over_student_seconds": {
                measured.engine: measured.median("score") / measured.median("sample")
                for measured in all_measured
                if measured.way == "sequential"
            },
            "measurements": [asdict(measured) for measured in all_measured],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _calibrate(folder: Path, size: Size, engine: str, console: Console) -> int:
    """Create the teacher; return its number of layers.

    Some of the seconds do not depend on layers, so the next number is interpolated linearly from
    the last two (the first one from the origin); the closest is used.
    """
    layers, seen, tried = 8, (0, 0.0), dict[int, float]()
    short = Size(4, size.prompts_per_step, size.generation_batch_size, size.max_new_tokens)
    for attempt in range(CALIBRATIONS):
        with console.status(f"{engine}: calibrating a teacher of {layers} layers"):
            _make_teacher(folder, layers)
            with teacher_services({"teacher": folder / "teacher"}, folder / "logs") as addresses:
                name = f"calibration-{engine}-{attempt}"
                lines = _run(folder, name, short, engine, WAYS["sequential"], addresses["teacher"])
        sample, score = (
            statistics.mean(line[f"time/{phase}"] for line in lines[1:])
            for phase in ("sample", "score")
        )
        tried[layers] = abs(score / sample - 1)
        if tried[layers] <= CLOSE_ENOUGH:
            break
        slope = (score - seen[1]) / (layers - seen[0])
        # A noisy minute can make more layers look faster.
        change = (sample - score) / slope if slope > 0 else layers * (sample / score - 1)
        seen, layers = (layers, score), max(1, min(MOST_LAYERS, layers + round(change)))
        if layers in tried:
            break
    nearest = min(tried, key=tried.__getitem__)
    _make_teacher(folder, nearest)
    return nearest


def _measure(
    folder: Path, size: Size, engine: str, rounds: int, console: Console
) -> list[Measured]:
    measured = {way: Measured(engine, way, {phase: [] for phase in PHASES}, [], []) for way in WAYS}
    with (
        teacher_services({"teacher": folder / "teacher"}, folder / "logs") as addresses,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task(f"{engine}: complete runs", total=rounds * len(WAYS))
        for number in range(rounds):
            for way, rollout in WAYS.items():
                name = f"{engine}-{way}-{number}"
                lines = _run(folder, name, size, engine, rollout, addresses["teacher"])
                _add(measured[way], lines[1:-1])
                progress.advance(task)
    return list(measured.values())


def _run(
    folder: Path,
    name: str,
    size: Size,
    engine: str,
    rollout: Mapping[str, Any],
    address: str,
) -> list[dict[str, Any]]:
    """Train a complete run; return its journal."""
    values = {
        "output_dir": folder / name,
        "max_steps": size.steps,
        "data": {"prompts": folder / "prompts.jsonl", "default_teacher": "teacher"},
        "student": {"model": str(folder / "student"), "device": "cpu", "learning_rate": 1e-5},
        "rollout": {
            "engine": engine,
            "prompts_per_step": size.prompts_per_step,
            "generation_batch_size": size.generation_batch_size,
            "max_new_tokens": size.max_new_tokens,
            **rollout,
        },
        # Token ids are sent, so that no completion of a random model is dropped.
        "teachers": {"teacher": {"url": [address], "top_k": 16, "loss": {"type": "topk_kl"}}},
        "logging": {"tensorboard": False, "completions": 0},
    }
    with redirect_stdout(StringIO()):
        train(RunConfig.model_validate(values))
    return [json.loads(line) for line in (folder / name / "journal.jsonl").read_text().splitlines()]


def _add(measured: Measured, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        for phase in PHASES:
            measured.seconds[phase].append(line[f"time/{phase}"])
        measured.hidden.append(line["time/hidden_share"])
        measured.tokens_per_second.append(line["tokens/trained"] / line["time/step"])


def _make_teacher(folder: Path, layers: int) -> None:
    _make_model(folder / "teacher", layers=layers, hidden=TEACHER_HIDDEN)


def _make_model(folder: Path, *, layers: int, hidden: int) -> None:
    make_small_teacher(folder, vocabulary=VOCABULARY, layers=layers, hidden=hidden)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _write_prompts(path: Path, size: Size) -> None:
    lines = [json.dumps({"prompt": f"def f{n}(x):"}) for n in range(4 * size.prompts_per_step)]
    path.write_text("\n".join(lines) + "\n")


def _print(all_measured: Sequence[Measured], console: Console) -> None:
    for engine in dict.fromkeys(measured.engine for measured in all_measured):
        ways = {measured.way: measured for measured in all_measured if measured.engine == engine}
        table = Table(
            title=f"{engine}: seconds of a step by phase (medians; phases may overlap)",
            box=SIMPLE,
            padding=0,
        )
        table.add_column("way")
        for title in (*PHASES, "hidden", "tokens/s", "gain"):
            table.add_column(title, justify="right")
        for way, measured in ways.items():
            table.add_row(
                way,
                *(f"{measured.median(phase):.2f}" for phase in PHASES),
                f"{statistics.median(measured.hidden):.0%}",
                f"{statistics.median(measured.tokens_per_second):,.0f}",
                f"{ways['sequential'].median('step') / measured.median('step'):.2f} ×",
            )
        console.print(table)
        sequential = ways["sequential"]
        ratio = sequential.median("score") / sequential.median("sample")
        console.print(f"{engine}: scoring takes {ratio:.2f} × the seconds of sampling")
    for measured in all_measured:
        if measured.way != "sequential":
            hidden = statistics.median(measured.hidden)
            console.print(
                f"{'reached' if hidden >= HIDDEN_BAR else 'MISSED '} {measured.engine}, "
                f"{measured.way}: {hidden:.1%} of the teacher's time hidden "
                f"(bar: at least {HIDDEN_BAR:.0%})"
            )


if __name__ == "__main__":
    main()
