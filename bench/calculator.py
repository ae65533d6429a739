"""Distil a conversation of two turns with a tool: a call of a calculator, and its result.

The teacher has a token for every number up to 999, the student one for every digit. Both are tiny;
the teacher is trained on finished conversations (``data.turns: all``), the student until it solves
few. Then the student converses with the calculator itself (``rollout.agent``), and the teacher
scores both of its turns over HTTP. A trajectory is right if the final answer is.

    python -m bench.calculator --output runs/calculator
"""

import argparse
import asyncio
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mopd.demo.models import build_model
from mopd.demo.services import teacher_services
from mopd_protocol import Message, Prompt
from mopd_trainer import (
    AgentClient,
    AgentSampler,
    RolloutConfig,
    RunConfig,
    Sampler,
    Student,
    StudentConfig,
    train,
)

AGENT = "python:bench.calculator:agent"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
OPERANDS = range(100)
_HELD_OUT, _EXERCISES = 5, 200
_EXPRESSION = re.compile(r"(\d{1,3})([-+*])(\d{1,3})")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_MAX_NEW_TOKENS = 40
_TRAJECTORIES = 32
_WEAK, _SAVE_STEPS = 0.2, 25


async def agent(prompt: Prompt, client: AgentClient) -> None:
    """Converse with a student and calculate its calls, in at most two turns."""
    messages: list[Message | dict[str, Any]] = [*prompt.messages]
    for _ in range(2):
        reply = await client.chat(messages, prompt.tools)
        messages.append(reply)
        for call in reply.tool_calls or ():
            result = calculated(str(call.function.arguments.get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not reply.tool_calls:
            return


def calculated(expression: str) -> str:
    """Return the value of an expression of two numbers, or ``error``."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error"
    return str(_OPERATIONS[match[2]](int(match[1]), int(match[3])))


def expressions(*, held_out: bool) -> list[str]:
    """Return the expressions of the training set, or the held-out ones, in random order."""
    every = [f"{a}{sign}{b}" for a in OPERANDS for sign in _OPERATIONS for b in OPERANDS]
    chosen = [
        each
        for each in every
        if (hashlib.sha256(each.encode()).digest()[0] % _HELD_OUT == 0) == held_out
    ]
    Random(0).shuffle(chosen)
    return chosen


def conversation(expression: str) -> list[dict[str, Any]]:
    """Return a finished conversation."""
    call = {"function": {"name": "calculator", "arguments": {"expression": expression}}}
    return [
        {"role": "user", "content": f"{expression}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": calculated(expression)},
        {"role": "assistant", "content": calculated(expression)},
    ]


def tokenizer_of(*, numbers: bool, vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with whole numbers or digits, and a template with tools."""
    end, padding, *roles = (
        ("<|im_end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
        if numbers
        else ("<|over|>", "<|blank|>", "<|about|>", "<|asks|>", "<|writes|>", "<|result|>")
    )
    tokenizer = Tokenizer(models.BPE())
    digits = Regex(r"\d{1,3}" if numbers else r"\d")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(digits, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [json.dumps(conversation("1*2")), json.dumps([TOOL])] * 50
    numerals = [f" {number} " for number in range(1000)] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *numerals], trainer)
    controls = [end, padding, *roles]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in controls])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=padding)
    names = dict(zip(("system", "user", "assistant", "tool"), roles, strict=True))
    wrapped.chat_template = (
        f"{{%- set names = {json.dumps(names)} %}}"
        "{%- if tools %}{{- names.system + tools | tojson }}{%- endif %}"
        "{%- for message in messages %}{{- names[message.role] + message.content }}"
        "{%- for call in message.tool_calls or [] %}"
        '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
        f"{{%- if message.role == 'assistant' %}}{{{{- '{end}' }}}}{{%- endif %}}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{- names.assistant }}{%- endif %}"
    )
    return wrapped


def settings(output: Path, model: Path, steps: int, **sections: Any) -> dict[str, Any]:
    """Return the settings of a run."""
    return {
        "output_dir": str(output),
        "max_steps": steps,
        "logging_steps": 50,
        "student": {
            "model": str(model),
            "device": "cpu",
            "warmup_steps": 20,
            "min_learning_rate_ratio": 0.1,
            "betas": [0.9, 0.98],
            "weight_decay": 0.01,
            "tokens_per_micro_batch": 8192,
        }
        | sections.pop("student"),
        **sections,
    }


def train_supervised(
    data: Path, model: Path, output: Path, steps: int, *, save_steps: int = 0
) -> Path:
    """Train a model on all turns of the conversations; return its folder."""
    student = {"learning_rate": 3e-3, "distill_loss_weight": 0.0}
    rollout = {"prompts_per_step": 64, "max_new_tokens": _MAX_NEW_TOKENS}
    source = {"prompts": str(data), "source": "answers", "turns": "all"}
    kept = {"save_steps": save_steps, "keep_checkpoints": 0}
    values = settings(output, model, steps, student=student, rollout=rollout, data=source, **kept)
    return train(RunConfig.model_validate(values))


def weak_student(data: Path, model: Path, output: Path, steps: int) -> Path:
    """Return the last of the models of a supervised run before one that solves more than
    ``_WEAK`` of the expressions."""
    train_supervised(data, model, output, steps, save_steps=_SAVE_STEPS)
    folders = [each / "model" for each in sorted((output / "checkpoints").glob("step-*"))]
    for folder in folders:
        if accuracy(folder) > _WEAK:
            break
        model = folder
    return model


def distil(data: Path, model: Path, output: Path, steps: int, url: str, loss: str) -> Path:
    """Train the student on its own conversations with the calculator; return its folder."""
    rollout = {
        "prompts_per_step": _TRAJECTORIES,
        "generation_batch_size": _TRAJECTORIES,
        "max_new_tokens": _MAX_NEW_TOKENS,
        "agent": AGENT,
    }
    teacher = {"url": url, "top_k": 16, "loss": {"type": loss}}
    values = settings(
        output,
        model,
        steps,
        student={"learning_rate": 1e-3},
        rollout=rollout,
        data={"prompts": str(data)},
        teachers={"calculator": teacher},
    )
    return train(RunConfig.model_validate(values))


def accuracy(model: Path) -> float:
    """Return the share of held-out expressions that a model solves greedily."""
    return asyncio.run(_accuracy(model))


async def _accuracy(model: Path) -> float:
    student = Student.load(StudentConfig(model=str(model), device="cpu"))
    config = RolloutConfig.model_validate(
        {"max_new_tokens": _MAX_NEW_TOKENS, "temperature": 0, "agent": AGENT}
    )
    sampler = AgentSampler(Sampler(student, config, seed=0), student.identity, config, seed=0)
    held_out = expressions(held_out=True)[:_EXERCISES]
    prompts = [
        Prompt(n, (Message(role="user", content=f"{each}?"),), {}, tools=(TOOL,))
        for n, each in enumerate(held_out)
    ]
    right = 0
    async for batch in sampler.sample(prompts, step=0):
        last = batch.rollouts[-1]
        expected = calculated(held_out[last.prompt.index]).encode()
        right += last.turn == 1 and last.completion.text == expected and last.completion.ends_turn
    return right / len(held_out)


def _write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _build(folder: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Path:
    build_model("qwen3", tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _phases(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield the name of each model and its accuracy."""
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    known = expressions(held_out=False)
    rows = [{"tools": [TOOL], "messages": conversation(each)} for each in known]
    finished = _write(output / "conversations.jsonl", rows)
    prompts = [{"tools": [TOOL], "messages": row["messages"][:1]} for row in rows]
    openings = _write(output / "prompts.jsonl", prompts)
    teacher_tokenizer = tokenizer_of(numbers=True, vocabulary=1500)
    model = _build(output / "teacher", teacher_tokenizer, seed=0)
    teacher = train_supervised(finished, model, output / "teacher-run", options.teacher_steps)
    yield "teacher", accuracy(teacher)
    model = _build(output / "student", tokenizer_of(numbers=False, vocabulary=340), seed=1)
    student = weak_student(finished, model, output / "student-run", options.student_steps)
    yield "student", accuracy(student)
    with teacher_services({"calculator": teacher}, output / "logs") as urls:
        url = urls["calculator"]
        run = output / f"distilled-{options.loss}"
        yield (
            "distilled",
            accuracy(distil(openings, student, run, options.steps, url, options.loss)),
        )


def main() -> None:
    """Train, distil, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--student-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loss", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"loss": options.loss, "steps": options.steps}
    started = time.process_time()
    for name, share in _phases(options):
        result[name] = share
        sys.stdout.write(f"{name} {share:.1%}\n")
        sys.stdout.flush()
    result["processor_seconds"] = round(time.process_time() - started)
    text = json.dumps(result)
    (options.output / f"result-{options.loss}.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
