"""Multi-teacher on-policy distillation by hand: from a prompt to an optimizer step, in one file.

The student samples a completion; every teacher scores the text over HTTP with its tokenizer; the
two tokenizations are aligned by bytes; a loss compares the two models on the aligned tokens; the
optimizer takes one step. `mopd train` does this in batches, with checkpoints and a journal.

    mopd demo --steps 1        # trains tiny models for a CPU
    mopd-teacher serve runs/demo/models/sums-teacher --name sums --port 8101 &
    python cookbook/loop_by_hand.py runs/demo/models/student sums=http://127.0.0.1:8101
"""

import argparse
import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mopd_client import Expectation, TeacherClient, TeacherPool
from mopd_losses import AlignedPair, CtkdConfig, DenseRows, Loss, align, build_loss
from mopd_protocol import Message, Prompt, Rollout, TextEncoder
from mopd_trainer import StudentIdentity, text_view

TOP_K = 32
EXERCISES = ["12 + 30 =", "7 + 8 =", "201 + 45 =", "99 + 1 ="]


@torch.no_grad()
def sample(model, student: StudentIdentity, prompt: Prompt, longest: int) -> Rollout:
    """Sample one completion at temperature 1, token by token."""
    ids = prompt_ids = student.prompt_token_ids(prompt.messages)
    real = torch.tensor(student.table.real_ids(student.logit_width))
    sampled: list[int] = []
    logprobs: list[float] = []
    while len(sampled) < longest and (not sampled or sampled[-1] not in student.table.roles.ending):
        row = model(torch.tensor([ids + sampled])).logits[0, -1].float()
        row = row.masked_fill(~real, -torch.inf).log_softmax(dim=0)  # no token for padding rows
        sampled.append(int(torch.multinomial(row.exp(), 1)))
        logprobs.append(float(row[sampled[-1]]))
    completion = student.table.sequence(sampled)
    return Rollout(
        prompt=prompt,
        prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
        completion=completion,
        sampled_logprobs=np.array(logprobs, dtype=np.float32),
        finish_reason="stop" if completion.ends_turn else "length",
        policy_version=0,
    )


async def loss_of(teacher: TeacherClient, student: StudentIdentity) -> tuple[Loss, TextEncoder]:
    """Return CTKD between the two vocabularies, and the teacher's encoder."""
    tokenizer = await teacher.tokenizer()
    return build_loss(CtkdConfig(divergence="forward_kl"), student, tokenizer), tokenizer.encoder


def completion_rows(model, student: StudentIdentity, rollout: Rollout) -> DenseRows:
    """Row r predicts completion token r: it is the model's output one position earlier."""
    ids = [*rollout.prompt_token_ids, *rollout.completion.token_ids]
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    first = len(rollout.prompt_token_ids) - 1
    real = torch.tensor(student.table.real_ids(student.logit_width))
    return DenseRows(logits[first : first + len(rollout.completion)], real)


async def distil(folder: str, urls: dict[str, str], *, steps: int, learning_rate: float) -> None:
    """Train: every teacher scores every completion, and their losses are averaged."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    student = StudentIdentity.of(model, AutoTokenizer.from_pretrained(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    share = dict.fromkeys(urls, 1.0)
    prompts = [
        Prompt(at, (Message(role="user", content=exercise),), share)
        for at, exercise in enumerate(EXERCISES)
    ]
    async with TeacherPool(
        {name: TeacherClient(name, [url]) for name, url in urls.items()}
    ) as pool:
        await pool.wait_until_ready(60.0)
        await pool.handshake_all({n: Expectation(top_k=TOP_K, messages=True) for n in urls})
        losses = {name: await loss_of(pool.client(name), student) for name in urls}
        for step in range(steps):
            rollouts = [sample(model, student, prompt, longest=24) for prompt in prompts]
            tokens = sum(len(rollout.completion) for rollout in rollouts)
            optimizer.zero_grad()
            total = 0.0
            for name, (loss, encoder) in losses.items():
                views = [text_view(rollout, student.table, encoder) for rollout in rollouts]
                requests = [view.request for view in views]
                scores = await pool.score(name, requests, top_k=TOP_K)
                for rollout, view, score in zip(rollouts, views, scores, strict=True):
                    alignment = align(view.completion, score.completion)
                    pair = AlignedPair(view.completion, rollout.sampled_logprobs, score, alignment)
                    rows = completion_rows(model, student, rollout)
                    nats = loss(rows, loss.targets([pair], [0])).per_token
                    mean = nats.sum() * rollout.prompt.teachers[name] / tokens
                    mean.backward()
                    total += float(mean.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            text = student.tokenizer.decode(rollouts[0].completion.token_ids)
            print(f"step {step + 1}: {total:.4f} nats a token; sampled {text!r}")  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="On-policy distillation by hand.")
    parser.add_argument("student", help="a Hugging Face model folder")
    parser.add_argument("teachers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    urls = dict(teacher.split("=", 1) for teacher in options.teachers)
    asyncio.run(
        distil(options.student, urls, steps=options.steps, learning_rate=options.learning_rate)
    )


if __name__ == "__main__":
    main()
