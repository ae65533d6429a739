"""Memory of a complete training step: distillation compared with plain cross entropy.

    python -m bench.step_memory --json step_memory.json              a 0.5 B student; minutes a step
    python -m bench.step_memory --layers 2 --json step_memory.json   the same head on a short body

A student of the shape of Qwen2.5-0.5B (24 layers of 896, a tied head of 151,936 rows, random
weights in float32) makes one step on one micro-batch of 4,096 completion tokens, with gradient
checkpointing, as ``mopd train`` would: forward, backward, AdamW. Each way runs in a separate
process on the same text: cross entropy of the tokens, and a teacher with another vocabulary (K 64)
and each of the losses. Bytes are resident memory above that of the loaded weights: the peak up to
the end of the backward pass, where losses differ, and of the complete step with AdamW's moments.
"""

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bench.losses import peak_bytes, resident_bytes
from bench.prefix_kl import completions
from mopd_losses import AlignedPair, Loss, LossConfig, build_loss
from mopd_trainer import Learner, MicroBatch, Student, StudentConfig, TeacherPart
from tests.real_vocabularies import real

STUDENT, TEACHER = "tekken", "v3"
TOKENS = 4_096
FLOOR = "cross entropy"
TEACHER_NAME = "teacher"
BAR = 1.1
CPU = torch.device("cpu")


def make_student(
    layers: int, device: torch.device = CPU, compute_dtype: torch.dtype = torch.float32
) -> Student:
    """Create a random student of the published shape with a tokenizer of 131,072 ids."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4_864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.gradient_checkpointing_enable()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=real(STUDENT).tokenizer,
        eos_token=real(STUDENT).tokenizer.id_to_token(2),
        chat_template="{% for message in messages %}{{ message.content }}\n{% endfor %}",
    )
    return Student(model, tokenizer, device, compute_dtype=compute_dtype)


def text_to_train_on() -> list[AlignedPair]:
    """Return completions of ``TOKENS`` tokens in total, or slightly fewer."""
    chosen: list[AlignedPair] = []
    tokens = 0
    for comparison in completions(STUDENT, TEACHER, 12):
        if tokens + len(comparison.student) <= TOKENS:
            chosen.append(comparison)
            tokens += len(comparison.student)
    return chosen


def micro_batch_of(comparisons: list[AlignedPair], *, supervised: bool) -> MicroBatch:
    """Return a micro-batch with one completion a row, after a prompt of one token."""
    lengths = [len(comparison.student) for comparison in comparisons]
    inputs = torch.zeros((len(lengths), max(lengths) + 1), dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, comparison in enumerate(comparisons):
        ids = torch.tensor(comparison.student.token_ids.astype(np.int64))
        inputs[row, 1 : len(ids) + 1] = ids
        mask[row, : len(ids) + 1] = 1
    slot_rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slot_columns = torch.cat([torch.arange(length) for length in lengths])
    labels = inputs[slot_rows, slot_columns + 1]
    offsets = tuple(np.cumsum([0, *lengths[:-1]]).tolist())
    part = TeacherPart(tuple(comparisons), offsets, *torch.ones((2, len(labels))))
    return MicroBatch(
        input_ids=inputs,
        attention_mask=mask,
        slot_rows=slot_rows,
        slot_columns=slot_columns,
        labels=labels if supervised else torch.full_like(labels, -100),
        slot_weights=torch.ones(len(labels)),
        teachers={} if supervised else {TEACHER_NAME: part},
    )


def loss_of(name: str, student: Student) -> Loss:
    """Build a loss with its defaults."""
    config: LossConfig = TypeAdapter(LossConfig).validate_python({"type": name})
    return build_loss(config, student.identity, real(TEACHER), student.device)


def measure(way: str, layers: int, pipe: Connection) -> None:
    """Measure one step in this process, and send the figures."""
    comparisons = text_to_train_on()
    pipe.send(measured_step(way, make_student(layers), comparisons))


def measured_step(way: str, student: Student, comparisons: list[AlignedPair]) -> dict[str, Any]:
    """Make one step with cross entropy or a loss; return its figures."""
    supervised = way == FLOOR
    losses = {} if supervised else {TEACHER_NAME: loss_of(way, student)}
    learner = Learner(
        student,
        StudentConfig(model="random", distill_loss_weight=0.0 if supervised else 1.0),
        losses=losses,
        teacher_weights=dict.fromkeys(losses, 1.0),
        max_steps=1,
        seed=0,
    )
    batch = micro_batch_of(comparisons, supervised=supervised)
    before = resident_bytes(student.device)
    until_update: list[int] = []

    def note(*_: object) -> None:
        until_update.append(peak_bytes(student.device) - before)

    learner.optimizer.register_step_pre_hook(note)
    started = time.perf_counter()
    metrics, _ = learner.update([batch], tokens=batch.slots, step=0)
    return {
        "objective": metrics["objective"],
        "grad_norm": metrics["grad_norm"],
        "parameters": student.identity.parameters,
        "tokens": batch.slots,
        "weights_bytes": 4 * student.identity.parameters,
        "until_update_bytes": until_update[0],
        "step_bytes": peak_bytes(student.device) - before,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Measure one way after the other, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--layers", type=int, default=24, help="(default: %(default)s)")
    parser.add_argument("--losses", default="ctkd,prefix_kl,gold", help="(default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    spawn = multiprocessing.get_context("spawn")
    ways: dict[str, dict[str, Any]] = {}
    for way in (FLOOR, *options.losses.split(",")):
        near, far = spawn.Pipe()
        process = spawn.Process(target=measure, args=(way, options.layers, far))
        process.start()
        far.close()
        try:
            ways[way] = near.recv()
        except EOFError:
            raise SystemExit(f"{way} did not finish; out of memory?") from None
        process.join()
        gigabytes = ways[way]["until_update_bytes"] / 1e9, ways[way]["step_bytes"] / 1e9
        console.print(
            f"{way}: {gigabytes[0]:.2f} and {gigabytes[1]:.2f} GB, {ways[way]['seconds']:.0f} s"
        )
    floor = ways[FLOOR]
    table = Table(
        title=f"{floor['parameters'] / 1e6:,.0f} M parameters, {floor['tokens']:,} tokens: GB over "
        f"the weights' {floor['weights_bytes'] / 1e9:.1f}; bar: {BAR} x cross entropy"
    )
    for heading in ("way", "forward and backward", "x", "complete step", "x"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way, measured in ways.items():
        cells = [way]
        for name in ("until_update_bytes", "step_bytes"):
            cells += [f"{measured[name] / 1e9:.2f}", f"{measured[name] / floor[name]:.3f}"]
        table.add_row(*cells)
    console.print(table)
    if options.json:
        report = {"layers": options.layers, "ways": ways, "torch": torch.__version__}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
