"""A training step: loss and gradient are the CPU's, and logits of all rows never exist at once."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench.step_memory import FLOOR, STUDENT, TEACHER, make_student, measured_step
from mopd_losses.alignment.byte_alignment import align
from mopd_losses.core.loss import AlignedPair
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests.real_vocabularies import real
from tests.trainer.scored_examples import losses_for
from tests.trainer.students import CPU, model_of, tokenizer
from tests.trainer.training.test_reference_completions import gradient, references, rollouts

pytestmark = pytest.mark.gpu

TOP_K = 64
#: Share of a norm by which float32 and bfloat16 differ after a few layers.
ERROR = {torch.float32: 1e-4, torch.bfloat16: 2**-4}


def step(
    where: torch.device, compute: torch.dtype
) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
    """Return metrics, gradient and weights after one step on reference answers and rollouts."""
    student = Student(model_of("qwen"), tokenizer("digit"), where, compute_dtype=compute)
    learner = Learner(
        student,
        StudentConfig(model="tiny", distill_loss_weight=0.5, max_grad_norm=1e9),
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights={"math": 1.0, "code": 2.5},
        max_steps=10,
        seed=0,
    )
    chosen = [*references(), *rollouts()]
    tokens = sum(len(example.rollout.completion) for example in chosen)
    metrics, _ = learner.update(pack(chosen, tokens_per_micro_batch=60), tokens=tokens, step=0)
    weights = [parameter.detach() for parameter in student.model.parameters()]
    assert {tensor.device for tensor in (*gradient(student), *weights)} == {where}
    return metrics, [each.cpu() for each in gradient(student)], [each.cpu() for each in weights]


@pytest.mark.parametrize("compute", ERROR)
def test_a_step_is_that_of_the_cpu(compute: torch.dtype, device: torch.device) -> None:
    metrics, gradients, weights = step(device, compute)
    expected, exact, expected_weights = step(CPU, torch.float32)
    for name in ("loss", "objective", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=ERROR[compute])
    difference = math.sqrt(
        sum(float((a - b).norm()) ** 2 for a, b in zip(gradients, exact, strict=True))
    )
    assert difference <= ERROR[compute] * expected["grad_norm"]
    before = model_of("qwen").parameters()
    rate = expected["learning_rate"]
    for old, weight, other in zip(before, weights, expected_weights, strict=True):
        assert float((weight - old.detach()).abs().max()) <= 1.1 * rate
        # Adam's first step is the sign of a gradient, which rounding decides where that is nothing.
        assert float((weight != old).float().mean()) >= 0.9 * float((other != old).float().mean())


def made_up_comparisons(texts: list[str]) -> list[AlignedPair]:
    """Return completions with a teacher of another published vocabulary, whose likeliest token is
    always that of the text; its other ids are any."""
    student, teacher = real(STUDENT), real(TEACHER)
    present = teacher.table.present.nonzero()[0]
    logprobs = np.log(np.array([0.6, *np.full(TOP_K - 1, 0.35 / (TOP_K - 1))]))
    pairs: list[AlignedPair] = []
    for text in texts:
        own, other = (side.table.sequence(side.encoder.encode(text)) for side in (student, teacher))
        ranks = np.searchsorted(present, other.token_ids)[:, None] + 1_009 * np.arange(TOP_K)
        rows = TopKLogprobs(
            ids=present[ranks % len(present)].astype(np.int32),
            logprobs=np.tile(logprobs, (len(other), 1)),
            token_logprobs=np.full(len(other), logprobs[0]),
            tail_logprobs=np.full(len(other), np.log(0.05)),
        )
        score = TeacherScore("m" * 32, other, rows)
        sampled = np.zeros(len(own), dtype=np.float32)
        pairs.append(AlignedPair(own, sampled, score, align(own, other), lookaheads=()))
    return pairs


@pytest.fixture(scope="module")
def comparisons(full_size: bool) -> list[AlignedPair]:
    """Completions of code: 16 of a thousand tokens, or one short one."""
    text = Path(__file__).with_name("test_loss_head.py").read_text()
    if not full_size:
        return made_up_comparisons([text[:400]])
    return made_up_comparisons([text[at : at + 3_400] for at in range(0, 4_400, 275)])


@pytest.mark.parametrize(
    ("way", "compute"),
    [
        (FLOOR, torch.bfloat16),
        ("ctkd", torch.float32),
        ("ctkd", torch.bfloat16),
        ("prefix_kl", torch.bfloat16),
    ],
)
def test_a_step_at_the_shape_of_a_published_model_is_bounded(
    way: str,
    compute: torch.dtype,
    comparisons: list[AlignedPair],
    device: torch.device,
    full_size: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A head of 151,936 rows; the logits of all rows would be 4 bytes for every id and token."""
    student = make_student(2 if full_size else 1, device, compute)
    figures = measured_step(way, student, comparisons)
    assert math.isfinite(figures["objective"])
    assert 0 < figures["grad_norm"] < math.inf
    if not full_size:  # the memory of a process is no measure of a small step
        return
    above = figures["until_update_bytes"] - figures["weights_bytes"]
    logits = 4 * figures["tokens"] * student.identity.logit_width
    with capsys.disabled():
        Console(width=100, highlight=False).print(
            f"\n{way}, {compute}: {figures['tokens']:,} tokens, {figures['seconds']:.1f} s, "
            f"{above / 1e9:.2f} GB above weights and gradients, logits {logits / 1e9:.2f} GB"
        )
    assert figures["tokens"] > 12_000
    assert above < logits
