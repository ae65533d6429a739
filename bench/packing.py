"""Training steps on examples of unequal lengths: one per row with padding, and all in one row.

    python -m bench.packing --json packing.json

A student of two layers (Qwen 3's, random weights) makes steps of cross entropy, AdamW included,
on examples whose lengths are spread 1 : 16 (in equal numbers per length, or per octave), in turns
with each layout and the same examples: tokens of prompts and completions a second of processor
time, under one budget of tokens a micro-batch. ``in order`` pads the examples as they were sampled;
``by length`` groups similar lengths first; ``packed`` has no padding. Then more packed steps of new
lengths: resident memory after the first third and at the end. About a minute of processor
time, which other processes do not change much.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.losses import resident_bytes
from mopd_trainer import Learner, Student, StudentConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import MicroBatch, micro_batch, pack
from tests.trainer.students import CPU, rollout, tokenizer

SPREAD = 16
LAYOUTS = ("in order", "by length", "packed")
BAR = 1.5


def make_learner(hidden: int, *, longest: int) -> Learner:
    """Create a random student that is trained with cross entropy."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=longest,
    )
    student = Student(Qwen3ForCausalLM(config), tokenizer("digit"), CPU, packing="packed")
    settings = StudentConfig(model="random", distill_loss_weight=0.0)
    return Learner(student, settings, losses={}, teacher_weights={}, max_steps=1_000, seed=0)


def examples_of(lengths: list[int]) -> list[TrainingExample]:
    """Return reference answers; a quarter of each example is its prompt."""
    built: list[TrainingExample] = []
    for index, length in enumerate(lengths):
        ids = [10 + (31 * place) % 400 for place in range(length)]
        prompt = max(1, length // 4)
        sample = rollout("digit", ids[prompt:], prompt_ids=ids[:prompt], index=index)
        built.append(TrainingExample(replace(sample, sampled_logprobs=None), ()))
    return built


def lengths_of(spread: str, count: int, longest: int, draws: random.Random) -> list[int]:
    """Draw lengths from ``longest / 16`` to ``longest``."""
    if spread == "lengths":
        return [draws.randint(longest // SPREAD, longest) for _ in range(count)]
    return [int(longest / SPREAD * SPREAD ** draws.random()) for _ in range(count)]


def batches_of(examples: list[TrainingExample], layout: str, budget: int) -> list[MicroBatch]:
    """Return the micro-batches of a layout."""
    if layout != "in order":
        packed = layout == "packed"
        return list(pack(examples, tokens_per_micro_batch=budget, packed=packed))
    groups: list[list[int]] = [[]]
    for index in range(len(examples)):
        group = [*groups[-1], index]
        if len(group) * max(examples[each].length for each in group) <= budget:
            groups[-1] = group
        else:
            groups.append([index])
    return [micro_batch([examples[each] for each in group], group) for group in groups]


def step(learner: Learner, examples: list[TrainingExample], batches: list[MicroBatch]) -> float:
    """Make a step; return its seconds of processor time."""
    tokens = sum(len(example.rollout.completion) for example in examples)
    started = time.process_time()
    learner.update(batches, tokens=tokens, step=0)
    return time.process_time() - started


def compare(options: argparse.Namespace, spread: str, budget: int) -> dict[str, Any]:
    """Measure steps on the same examples in each layout."""
    learner = make_learner(options.hidden, longest=options.longest)
    draws = random.Random(0)
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    tokens: list[int] = []
    padding: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for number in range(options.rounds + 1):
        count = options.examples if number else 2  # the first steps only allocate
        examples = examples_of(lengths_of(spread, count, options.longest, draws))
        tokens.append(sum(example.length for example in examples))
        first = number % len(LAYOUTS)
        for layout in LAYOUTS[first:] + LAYOUTS[:first]:
            batches = batches_of(examples, layout, budget)
            positions = sum(batch.input_ids.numel() for batch in batches)
            seconds[layout].append(step(learner, examples, batches))
            padding[layout].append(1 - tokens[-1] / positions)

    def median(values: Sequence[float], over: Sequence[float]) -> float:
        pairs = list(zip(values, over, strict=True))[1:]
        return statistics.median(value / other for value, other in pairs)

    return {
        "spread": spread,
        "budget": budget,
        "padding": {layout: statistics.median(padding[layout][1:]) for layout in LAYOUTS},
        "tokens_per_second": {layout: median(tokens, seconds[layout]) for layout in LAYOUTS},
        "packed_is": {layout: median(seconds[layout], seconds["packed"]) for layout in LAYOUTS},
    }


def growth(options: argparse.Namespace) -> dict[str, float]:
    """Return resident bytes after a third of many packed steps, and after all of them."""
    learner = make_learner(options.hidden, longest=options.longest)
    draws = random.Random(1)
    resident: list[int] = []
    for _ in range(options.steps):
        examples = examples_of(lengths_of("octaves", 8, options.longest // 4, draws))
        step(learner, examples, batches_of(examples, "packed", options.longest))
        resident.append(resident_bytes(CPU))
    return {"first_third": max(resident[: options.steps // 3]), "end": resident[-1]}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    for name, default in (
        ("hidden", 128),
        ("longest", 1_024),
        ("examples", 32),
        ("rounds", 3),
        ("steps", 30),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--budgets", default="16384", help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        compare(options, spread, int(budget))
        for spread in ("lengths", "octaves")
        for budget in options.budgets.split(",")
    ]
    memory = growth(options)
    table = Table(title=f"tokens a second, lengths 1 : {SPREAD}; bar: {BAR} x padded")
    for heading in ("equal numbers per", "budget", "layout", "padding", "tokens/s", "packed is"):
        table.add_column(heading, justify="right")
    for row in rows:
        for layout in LAYOUTS:
            rate, ratio = (row[name][layout] for name in ("tokens_per_second", "packed_is"))
            cells = layout, f"{row['padding'][layout]:.0%}", f"{rate:,.0f}", f"{ratio:.2f} x"
            table.add_row(row["spread"], f"{row['budget']:,}", *cells)
    console = Console()
    console.print(table)
    first, end = memory["first_third"] / 1e6, memory["end"] / 1e6
    console.print(f"{options.steps} packed steps: {first:,.0f} MB after a third, {end:,.0f} MB")
    if options.json:
        report = {"rows": rows, "memory": memory, "torch": torch.__version__}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
