"""Training throughput of one and two student ranks with each sharding, and sampling throughput of
the student, one Ray rollout worker and two.

    python -m bench.ranks --json ranks.json

Every way is started with ``torchrun``, one after the other in each round, with ``--threads`` for
each rank; a way's first step is a warm-up and is not counted. The examples are reference answers
(cross entropy), so that no teacher is needed: the optimizer step is measured from the examples to
the new weights, and the gathering of the weights on rank 0, which samples with them. Two ranks on
one machine share its memory and possibly its cores; the report includes the number of cores,
without which a figure is meaningless.

Completions are sampled by transformers, up to ``--tokens`` long, in batches of a quarter of
``--sequences``, with weights that are pushed before each step: the push into Ray's object store is
reported separately, and fetching the weights is a part of the step. Needs Ray, except with
``--no-workers``.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.small_teacher import make_small_teacher, token_sequences
from mopd_protocol import Message, Prompt, Rollout
from mopd_trainer import Learner, RunConfig, Student, StudentConfig, TrainingExample, pack
from mopd_trainer.data.packing import split
from mopd_trainer.distributed.process_group import Ranks, init_distributed
from mopd_trainer.rollouts.remote_sampler import RolloutWorkers, push_to_workers

#: Number of ranks, and sharding of the weights.
WAYS = ((1, "none"), (2, "ddp"), (2, "fsdp"))
PROMPT = Prompt(0, (Message(role="user", content="continue"),), {})
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Measurement:
    """Measurements of one way over all rounds."""

    ranks: int
    sharding: str
    step_seconds: list[float]
    gather_seconds: list[float]
    """Gathering the weights on rank 0; close to 0 if the rank has all of them."""
    tokens_per_second: float  # in the median step
    speedup: float  # of the median step, over one rank


@dataclass(frozen=True)
class SamplingMeasurement:
    """Measurements of one number of rollout workers over all rounds; 0 is the student itself."""

    workers: int
    step_seconds: list[float]
    push_seconds: list[float]
    """Pushes into the object store; workers fetch the weights with their first batch."""
    tokens_per_second: float  # in the median step
    speedup: float  # of the median step, over one worker


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="a rank (default: 1)")
    parser.add_argument("--hidden", type=int, default=256, help="of the student (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="of the student (default: 4)")
    parser.add_argument("--sequences", type=int, default=16, help="a step (default: 16)")
    parser.add_argument("--tokens", type=int, default=256, help="a sequence (default: 256)")
    parser.add_argument("--steps", type=int, default=4, help="a round, and one more (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--no-workers", action="store_true", help="train only")
    parser.add_argument(
        "--folder", type=Path, help=argparse.SUPPRESS
    )  # on a rank: the student's folder
    parser.add_argument("--sharding", help=argparse.SUPPRESS)
    options = parser.parse_args()
    disable_progress_bar()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "RAY_USAGE_STATS_ENABLED": "0"}
    if options.folder is not None:
        work_on_a_rank(options)
        return
    with TemporaryDirectory(prefix="mopd-bench-") as temporary:
        folder, console = Path(temporary), Console()
        parameters = make_student(folder, hidden=options.hidden, layers=options.layers)
        seconds = {way: (list[float](), list[float]()) for way in WAYS}
        for _ in range(options.rounds):
            for ranks, sharding in WAYS:
                steps, gathers = run(folder, ranks, sharding)
                console.print(f"{ranks} x {sharding}: {statistics.median(steps):.2f} s a step")
                seconds[ranks, sharding][0].extend(steps)
                seconds[ranks, sharding][1].extend(gathers)
        written = [] if options.no_workers else measure_sampling(folder, options, console)
    tokens = options.sequences * options.tokens
    one_rank = statistics.median(seconds[WAYS[0]][0])
    measurements = [
        Measurement(ranks, sharding, steps, gathers, tokens / median, one_rank / median)
        for (ranks, sharding), (steps, gathers) in seconds.items()
        for median in [statistics.median(steps)]
    ]
    show(measurements, console)
    show_sampling(written, console)
    if options.json:
        report = {
            "device": options.device,
            "cores": len(os.sched_getaffinity(0)),
            "threads_per_rank": options.threads,
            "parameters": parameters,
            "tokens_per_step": tokens,
            "machine": platform.platform(),
            "torch": torch.__version__,
            "measurements": [asdict(measurement) for measurement in measurements],
            "writing": [asdict(measurement) for measurement in written],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def make_student(folder: Path, *, hidden: int, layers: int) -> int:
    """Save a Qwen3 with random weights and a chat template; return its number of parameters."""
    make_small_teacher(folder, vocabulary=4096)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def run(folder: Path, ranks: int, sharding: str) -> tuple[list[float], list[float]]:
    """Return the seconds of each step and of each gathering, in new processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    own = ["-m", "bench.ranks", *sys.argv[1:], f"--folder={folder}", f"--sharding={sharding}"]
    subprocess.run([sys.executable, "-m", *launch, *own], check=True)
    seconds = json.loads((folder / "seconds.json").read_text())
    return seconds["steps"], seconds["gathers"]


def work_on_a_rank(options: argparse.Namespace) -> None:
    """Train on this rank; rank 0 saves the seconds."""
    torch.set_num_threads(options.threads)
    config = StudentConfig(
        model=str(options.folder),
        device=options.device,
        sharding=options.sharding,
        distill_loss_weight=0.0,
        tokens_per_micro_batch=4 * options.tokens,
    )
    with init_distributed(config.device) as ranks:
        seconds = measure(config, ranks, options)
        if ranks.is_rank_zero:
            (options.folder / "seconds.json").write_text(json.dumps(seconds))


def measure(
    config: StudentConfig, ranks: Ranks, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of the steps after the first, and of gathering the weights after each."""
    student = Student.load(config, ranks)
    learner = Learner(
        student, config, losses={}, teacher_weights={}, max_steps=options.steps + 1, seed=0
    )
    examples = reference_examples(student, options)
    seconds: dict[str, list[float]] = {"steps": [], "gathers": []}
    for step in range(options.steps + 1):
        began = time.perf_counter()
        budget = config.tokens_per_micro_batch
        batches = list(pack(examples, tokens_per_micro_batch=budget, ranks=ranks.size))
        own_batches = ranks.scatter(split(batches, ranks.size))
        learner.update(own_batches, tokens=options.sequences * options.tokens, step=step)
        trained = time.perf_counter()
        student.gather()
        if step:
            seconds["steps"].append(trained - began)
            seconds["gathers"].append(time.perf_counter() - trained)
    return seconds


def measure_sampling(
    folder: Path, options: argparse.Namespace, console: Console
) -> list[SamplingMeasurement]:
    """Measure the student, one worker and two, which sample the same batches."""
    import ray

    from mopd_trainer.launch.workers import RayWorkers, worker_actor

    config = RunConfig.model_validate(
        {
            "output_dir": folder / "run",
            "max_steps": 1,
            "data": {"prompts": folder / "prompts.jsonl"},
            "student": {"model": str(folder), "device": options.device},
            "rollout": {"max_new_tokens": options.tokens},
            "teachers": {"none": {"url": "http://unused"}},
            "resources": {"device": options.device, "rollout_workers": 2},
        }
    )
    torch.set_num_threads(options.threads)
    student = Student.load(config.student)
    prompt = student.prompt_token_ids(PROMPT.messages)
    batches = [[prompt] * max(1, options.sequences // 4)] * 4
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        device = {"num_gpus": 1} if options.device == "cuda" else {}
        actors = [worker_actor(config, {"num_cpus": 1, **device}) for _ in range(2)]
        medians: list[float] = []
        rates: list[float] = []
        times: list[tuple[list[float], list[float]]] = []
        for count in (0, 1, 2):
            workers = RayWorkers(actors[:count], config) if count else None
            seconds = asyncio.run(sample_steps(student, config, workers, batches, options))
            medians.append(statistics.median(seconds["steps"]))
            rates.append(seconds["tokens"][0] / medians[-1])
            times.append((seconds["steps"], seconds["pushes"]))
            console.print(f"{count} rollout workers: {medians[-1]:.2f} s a step")
    finally:
        ray.shutdown()
    return [
        SamplingMeasurement(count, *times[count], rates[count], medians[1] / medians[count])
        for count in (0, 1, 2)
    ]


async def sample_steps(
    student: Student,
    config: RunConfig,
    workers: RolloutWorkers | None,
    batches: Sequence[Sequence[Sequence[int]]],
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Return the seconds of each step after the first and of each push, and a step's tokens."""
    seconds: dict[str, list[float]] = {"steps": [], "pushes": [], "tokens": []}
    for step in range(options.rounds * options.steps + 1):
        began = time.perf_counter()
        if workers is not None:
            await push_to_workers(workers, student, step)
        pushed = time.perf_counter()
        if workers is None:
            batches_sampled = [
                student.generate(batch, config.rollout, seed=seed)
                for seed, batch in enumerate(batches)
            ]
        else:
            calls = [workers.generate(batch, seed=seed) for seed, batch in enumerate(batches)]
            batches_sampled = [sampled for sampled, _ in await asyncio.gather(*calls)]
        if step:
            seconds["pushes"].append(pushed - began)
            seconds["steps"].append(time.perf_counter() - pushed)
            tokens = sum(len(sampled.token_ids) for batch in batches_sampled for sampled in batch)
            seconds["tokens"].append(float(tokens))
    return seconds


def reference_examples(student: Student, options: argparse.Namespace) -> list[TrainingExample]:
    """Return reference answers of equal length, without an ending token."""
    prompt_ids = np.array(student.prompt_token_ids(PROMPT.messages), dtype=np.int32)
    return [
        TrainingExample(
            Rollout(
                prompt=PROMPT,
                prompt_token_ids=prompt_ids,
                completion=student.table.sequence(ids),
                sampled_logprobs=None,
                finish_reason="length",
                policy_version=0,
            ),
            (),
        )
        for ids in token_sequences(options.folder, count=options.sequences, tokens=options.tokens)
    ]


def show(measurements: Sequence[Measurement], console: Console) -> None:
    """Print a table."""
    table = Table("ranks", "sharding", "s a step", "tokens/s", "over one rank", "s to gather")
    for each in measurements:
        table.add_row(
            str(each.ranks),
            each.sharding,
            f"{statistics.median(each.step_seconds):.3f}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.speedup:.2f}",
            f"{statistics.median(each.gather_seconds):.3f}",
        )
    console.print(table)


def show_sampling(measurements: Sequence[SamplingMeasurement], console: Console) -> None:
    """Print a table of the sampling measurements, if there are any."""
    if not measurements:
        return
    table = Table("rollout workers", "s a step", "tokens/s", "over one worker", "s to push")
    for each in measurements:
        table.add_row(
            str(each.workers or "none"),
            f"{statistics.median(each.step_seconds):.3f}",
            f"{each.tokens_per_second:,.0f}",
            f"{each.speedup:.2f}",
            f"{statistics.median(each.push_seconds):.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
