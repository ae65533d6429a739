"""Training steps on examples of unequal lengths: one per row with padding, and all in one row.

    python -m bench.packing --json packing.json

A student of four layers (Qwen 3's, random weights) makes steps of cross entropy, AdamW included,
on examples whose lengths are spread 1 : 16 (in equal numbers per length, or per octave), in turns
with either layout and the same examples: tokens of prompts and completions a second of processor
time. ``padded`` is the grouping of similar lengths under the same budget. Then more packed steps of
new lengths: resident memory after the first third and at the end.
"""

import argparse
import json
import random
import statistics
import time
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
from mopd_trainer.data.packing import pack
from tests.trainer.students import CPU, rollout, tokenizer

SPREAD = 16
BAR = 1.5


def make_learner(hidden: int, *, longest: int) -> Learner:
    """Create a random student that is trained with cross entropy."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
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


def step(learner: Learner, examples: list[TrainingExample], budget: int, *, packed: bool) -> float:
    """Make a step; return its seconds of processor time."""
    tokens = sum(len(example.rollout.completion) for example in examples)
    batches = list(pack(examples, tokens_per_micro_batch=budget, packed=packed))
    started = time.process_time()
    learner.update(batches, tokens=tokens, step=0)
    return time.process_time() - started


def compare(options: argparse.Namespace, spread: str, budget: int) -> dict[str, Any]:
    """Measure pairs of steps on the same examples."""
    learner = make_learner(options.hidden, longest=options.longest)
    draws = random.Random(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens: list[int] = []
    padding: list[float] = []
    for number in range(options.rounds + 1):
        examples = examples_of(lengths_of(spread, options.examples, options.longest, draws))
        tokens.append(sum(example.length for example in examples))
        padded = pack(examples, tokens_per_micro_batch=budget)
        padding.append(1 - tokens[-1] / sum(batch.input_ids.numel() for batch in padded))
        for packed in (number % 2 == 0, number % 2 == 1):
            seconds[packed].append(step(learner, examples, budget, packed=packed))
    rates = {
        packed: statistics.median(
            count / each for count, each in zip(tokens[1:], values[1:], strict=True)
        )
        for packed, values in seconds.items()
    }
    return {
        "spread": spread,
        "budget": budget,
        "padding": statistics.median(padding[1:]),
        "padded": rates[False],
        "packed": rates[True],
        "ratio": rates[True] / rates[False],
    }


def growth(options: argparse.Namespace) -> dict[str, float]:
    """Return resident bytes after a third of many packed steps, and after all of them."""
    learner = make_learner(options.hidden, longest=options.longest)
    draws = random.Random(1)
    resident: list[int] = []
    for _ in range(options.steps):
        examples = examples_of(lengths_of("octaves", 8, options.longest // 4, draws))
        step(learner, examples, options.longest, packed=True)
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
    parser.add_argument("--budgets", default="4096,16384", help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        compare(options, spread, int(budget))
        for spread in ("lengths", "octaves")
        for budget in options.budgets.split(",")
    ]
    memory = growth(options)
    table = Table(title=f"tokens a second, lengths 1 : {SPREAD}; bar: {BAR} x padded")
    for heading in ("equal numbers per", "budget", "padding", "padded", "packed", "x"):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = f"{row['padding']:.0%}", f"{row['padded']:,.0f}", f"{row['packed']:,.0f}"
        table.add_row(row["spread"], f"{row['budget']:,}", *rates, f"{row['ratio']:.2f}")
    console = Console()
    console.print(table)
    first, end = memory["first_third"] / 1e6, memory["end"] / 1e6
    console.print(f"{options.steps} packed steps: {first:,.0f} MB after a third, {end:,.0f} MB")
    if options.json:
        report = {"rows": rows, "memory": memory, "torch": torch.__version__}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
