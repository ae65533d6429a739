"""Processor time of whole training steps, by the service's engine, and of small requests.

    python -m bench.teacher_service --steps

A step is 64 completions of 2,000 tokens with prompts of 1,500: scored in a request for each
completion, in one call of the client, and by ``mopd train``, whose student is the same small model.
Bar: the call costs at most 1.1 times the processor time of the small requests.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.scoring_ways import Samples, Service, started_ways
from bench.small_teacher import make_small_teacher, token_sequences
from mopd_trainer import RunConfig, train

PROMPT, COMPLETION, SEQUENCES = 1500, 2000, 64
#: Mean length of the student's completions: one of this many tokens is the end.
VOCABULARY = 16_384


async def measure_steps(
    folder: Path, options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Return the measurements of each engine."""
    rows: list[dict[str, Any]] = []
    make_small_teacher(folder, vocabulary=VOCABULARY, hidden=options.hidden)
    generator = np.random.default_rng(0)
    for engine in ("vllm", "transformers"):
        async with started_ways(folder, folder.parent, [engine], None) as ways:
            [(name, way)] = ways.items()
            assert isinstance(way, Service)
            kinds = {"small requests": _small, "one call": _call}
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(options.rounds + 1):
                for kind, score in kinds.items():
                    before = _seconds(way)
                    await score(way, _step(generator), options.k)
                    if number:  # the first is a warm-up
                        tokens = SEQUENCES * COMPLETION
                        times[kind].append(1e6 * (_seconds(way) - before) / tokens)
            trained = await _train(folder, way, options.k)
            rows.append({"way": name, **times, "service during mopd train": trained})
            console.print(rows[-1])
    _print(rows, console)
    return rows


async def _small(service: Service, step: Sequence[Samples], k: int) -> None:
    await asyncio.gather(*[service.score(samples, k) for samples in step])


async def _call(service: Service, step: Sequence[Samples], k: int) -> None:
    await service.score_all(step, k)


def _step(generator: np.random.Generator) -> list[Samples]:
    ids = generator.integers(1, 300, (SEQUENCES, PROMPT + COMPLETION))
    return [Samples(each[:PROMPT].tolist(), [each[PROMPT:].tolist()]) for each in ids]


async def _train(folder: Path, service: Service, k: int) -> list[float]:
    """Train for a step; return the processor time of the service for each scored token."""
    texts = _texts(folder)
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = RunConfig.model_validate(
        {
            "output_dir": str(folder.parent / f"run-{time.time_ns()}"),
            "max_steps": 1,
            "data": {"prompts": str(data)},
            "student": {"model": str(folder), "learning_rate": 1e-6, "device": "cpu"},
            "rollout": {"prompts_per_step": SEQUENCES, "max_new_tokens": COMPLETION},
            "teachers": {"teacher": {"url": service.url, "top_k": k}},
            "logging": {"tensorboard": False},
        }
    )
    before = _processes(service)
    await asyncio.to_thread(train, config)
    seconds = _processes(service) - before
    journal = (Path(config.output_dir) / "journal.jsonl").read_text().splitlines()
    tokens = sum(json.loads(line)["teacher/teacher/scored_tokens"] for line in journal)
    return [1e6 * seconds / tokens]


def _texts(folder: Path) -> list[str]:
    """Return a prompt of about ``PROMPT`` tokens for each completion."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = token_sequences(folder, count=SEQUENCES, tokens=PROMPT)
    return [tokenizer.decode(each) for each in ids]


def _seconds(service: Service) -> float:
    return time.process_time() + _processes(service)


def _processes(service: Service) -> float:
    times = [process.cpu_times() for process in service.processes()]
    return sum(each.user + each.system for each in times)


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    shape = f"{SEQUENCES} × ({PROMPT} + {COMPLETION})"
    table = Table(title=f"µs of processor time per completion token, steps of {shape}, medians")
    columns = ("small requests", "one call", "service during mopd train")
    for column in ("", *columns, "call / requests"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        pairs = zip(row["small requests"], row["one call"], strict=True)
        ratio = statistics.median(call / small for small, call in pairs)
        medians = [f"{statistics.median(row[column]):,.0f}" for column in columns]
        table.add_row(row["way"], *medians, f"{ratio:.2f}")
    console.print(table)
