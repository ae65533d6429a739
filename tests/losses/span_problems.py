"""Random completions of two tokenizers, judged by a random teacher, in float64."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.places import device_projection
from tests.losses.sequences import Piece, sequence
from tests.reference.dual import Dual, softmax, variables
from tests.reference.span_view import SpanView, TeacherRow

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """A micro-batch: logits of every slot, and what one teacher said about some completions."""

    logits: Tensor  # [slots, width]
    real: NDArray[np.bool_]  # [width]
    comparisons: list[AlignedPair]
    offsets: list[int]
    teacher_size: int
    partner: dict[int, int]  # teacher id -> student id
    weights: Floats  # [width, teacher size], a projection

    def rows(self) -> DenseRows:
        return DenseRows(self.logits, torch.tensor(self.real))

    def projection(self) -> DeviceProjection:
        return device_projection(self.weights, self.real)

    def match(self) -> VocabularyMatch:
        student_of = torch.full((self.teacher_size,), -1)
        unmatched = torch.tensor(self.real).clone()
        for j, v in self.partner.items():
            student_of[j] = v
            unmatched[v] = False
        return VocabularyMatch(student_of, unmatched)

    def with_logits(self, logits: Tensor) -> "Problem":
        return replace(self, logits=logits)


def cut(text: bytes, draw: np.random.Generator, chance: float) -> list[Piece]:
    """The text with a cut after each byte by chance."""
    pieces: list[Piece] = []
    for at in range(len(text)):
        if pieces and draw.random() > chance:
            pieces[-1] += text[at : at + 1]  # type: ignore[operator]
        else:
            pieces.append(text[at : at + 1])
    return pieces


def with_ids(written: TokenSequence, ids: NDArray[np.integer]) -> TokenSequence:
    return TokenSequence(ids, written.byte_ends, written.text, written.marks)


def topk_of(probabilities: Floats, tokens: NDArray[np.integer], kept: list[int]) -> TopKLogprobs:
    """Rows cut to as many entries as ``kept`` says, short ones filled with absent entries."""
    width = max(kept, default=0)
    ids = np.full((len(kept), width), -1)
    logprobs = np.full((len(kept), width), -np.inf)
    tails = np.full(len(kept), -np.inf)
    for row, (p, k) in enumerate(zip(probabilities, kept, strict=True)):
        order = np.argsort(-p)
        ids[row, :k], logprobs[row, :k] = order[:k], np.log(p[order[:k]])
        if k < len(p):
            tails[row] = np.log(p[order[k:]].sum())
    realised = np.log(probabilities[np.arange(len(tokens)), tokens])
    return TopKLogprobs(ids, logprobs, realised, tails)


def random_comparison(
    draw: np.random.Generator, width: int, teacher_size: int, most_bytes: int = 6
) -> AlignedPair:
    """One completion; sometimes empty, sometimes ended, sometimes with texts that differ."""
    text = bytes(draw.choice(list(b"abc"), draw.integers(0, most_bytes + 1)).tolist())
    other = text if draw.random() < 0.8 else text[: len(text) // 2] + b"zz"
    end: list[Piece] = [END_OF_TURN] if draw.random() < 0.5 else []
    student = sequence([*cut(text, draw, 0.7), *end])
    teacher = sequence([*cut(other, draw, 0.5), *end])
    student = with_ids(student, draw.integers(0, width, len(student)))
    teacher = with_ids(teacher, draw.integers(0, teacher_size, len(teacher)))
    scale = draw.choice([0.5, 1.5])
    logits = draw.normal(size=(len(teacher), teacher_size)) * scale
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    kept = draw.integers(0, teacher_size + 1, len(teacher)).tolist()
    topk = topk_of(probabilities, teacher.token_ids, kept)
    return AlignedPair(
        student=student,
        sampled_logprobs=np.zeros(len(student), np.float32),
        score=TeacherScore("teacher", teacher, topk),
        alignment=align(student, teacher),
    )


def random_problem(seed: int, completions: int | None = None) -> Problem:
    """Any mix of spans, top-k sizes, shared ids, projections and padding."""
    draw = np.random.default_rng(seed)
    size, teacher_size = draw.integers(2, 7, size=2).tolist()
    width = size + int(draw.integers(0, 3))
    if completions is None:
        completions = int(draw.integers(0, 4))
    comparisons = [random_comparison(draw, size, teacher_size) for _ in range(completions)]
    offsets: list[int] = []
    slots = 0
    for comparison in comparisons:
        slots += int(draw.integers(0, 2))  # a completion of another teacher between
        offsets.append(slots)
        slots += len(comparison.student)
    slots += int(draw.integers(0, 2))
    pairs = int(draw.integers(0, min(size, teacher_size) + 1))
    partner = dict(
        zip(
            draw.choice(teacher_size, pairs, replace=False).tolist(),
            draw.choice(size, pairs, replace=False).tolist(),
            strict=True,
        )
    )
    weights = np.zeros((width, teacher_size))
    for row in weights[:size]:
        spread = min(int(draw.choice([0, 1, 1, 2, 3])), teacher_size)
        row[draw.choice(teacher_size, spread, replace=False)] = draw.dirichlet(np.ones(spread))
    return Problem(
        logits=torch.tensor(draw.normal(size=(slots, width)) * draw.choice([0.5, 1.5])),
        real=np.arange(width) < size,
        comparisons=comparisons,
        offsets=offsets,
        teacher_size=teacher_size,
        partner=partner,
        weights=weights,
    )


def teacher_row(comparison: AlignedPair, row: int) -> TeacherRow:
    """What was sent for one teacher token."""
    topk = comparison.score.topk
    sent = zip(topk.ids[row].tolist(), topk.logprobs[row].tolist(), strict=True)
    return TeacherRow(
        kept={j: float(np.exp(lp)) for j, lp in sent if j >= 0},
        rest=float(np.exp(float(topk.tail_logprobs[row]))),
        token=int(comparison.score.completion.token_ids[row]),
        token_probability=float(np.exp(float(topk.token_logprobs[row]))),
    )


def views(problem: Problem, temperature: float = 1.0) -> list[tuple[int, SpanView]]:
    """(first slot, span) for every span; every logit is a variable."""
    real = problem.real.tolist()
    rows = [softmax(row, real, temperature) for row in variables(problem.logits.tolist())]
    found: list[tuple[int, SpanView]] = []
    for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True):
        alignment, labels = comparison.alignment, comparison.student.token_ids.tolist()
        mine = rows[offset : offset + len(labels)]
        theirs = [teacher_row(comparison, r) for r in range(len(comparison.score.completion))]
        columns = (
            alignment.student_starts,
            alignment.student_ends,
            alignment.teacher_starts,
            alignment.teacher_ends,
        )
        for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True):
            view = SpanView(
                student=mine[a:b],
                labels=labels[a:b],
                teacher=theirs[c:d],
                next_student=mine[b] if b < len(mine) else None,
                next_teacher=theirs[d] if d < len(theirs) else None,
            )
            found.append((offset + a, view))
    return found


def scattered(problem: Problem, values: list[tuple[int, Dual]]) -> tuple[Floats, Floats]:
    """[slots] values, and the gradient [slots, width] of their sum."""
    per_token = np.zeros(len(problem.logits))
    gradient = np.zeros(problem.logits.numel())
    for slot, value in values:
        per_token[slot] += value.value
        gradient += value.slopes
    return per_token, gradient.reshape(problem.logits.shape)


def value_and_gradient(problem: Problem, output: LossOutput) -> tuple[Floats, Floats]:
    """The same of a loss; the problem's logits must require a gradient."""
    (gradient,) = torch.autograd.grad(output.per_token.sum(), problem.logits)
    return output.per_token.detach().numpy(), gradient.numpy()
