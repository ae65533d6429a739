"""Random completions of two tokenizers with the scores of a random teacher, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mopd_losses.alignment.byte_alignment import align, identity_alignment
from mopd_losses.core.loss import AlignedPair, LossOutput
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_losses.topk.teacher_events import TeacherEvents
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.sequences import Piece, sequence
from tests.losses.topk_problems import device_projection
from tests.reference.dual import Dual, softmax, variables
from tests.reference.span_view import SpanView, TeacherRow

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """A micro-batch: logits of every position, and one teacher's scores of some completions."""

    logits: Tensor  # [positions, width]
    real: NDArray[np.bool_]  # [width]; the real ids come first
    comparisons: list[AlignedPair]
    offsets: list[int]
    teacher_size: int
    partner: dict[int, int]  # teacher id -> student id
    weights: Floats  # [width, teacher size], a projection
    one_vocabulary: bool = False
    #: [teacher size], the student's first token of each teacher id's text; -1 for some
    first_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def rows(self) -> DenseRows:
        """The student, in float64."""
        return DenseRows(self.logits, torch.tensor(self.real))

    def projection(self) -> DeviceProjection:
        """``weights`` as losses read a projection."""
        return device_projection(self.weights, self.real)

    def events(self) -> TeacherEvents:
        """The events of ``projection`` and ``first_tokens``."""
        return TeacherEvents.of(self.projection(), lambda ids: self.first_tokens[list(ids)])

    def match(self) -> VocabularyMatch:
        """``partner`` as losses read a match."""
        student_of = torch.full((self.teacher_size,), -1)
        unmatched = torch.tensor(self.real).clone()
        for j, v in self.partner.items():
            student_of[j] = v
            unmatched[v] = False
        return VocabularyMatch(student_of, unmatched)

    def columns(self, _targets: object) -> list[int]:
        """Return the student ids whose logits a loss may read."""
        return list(range(self.logits.shape[1]))

    def of_twin(self) -> Self:
        """Return the problem that the slow twin solves."""
        return self

    def with_logits(self, logits: Tensor) -> Self:
        """Replace the student's logits."""
        return replace(self, logits=logits)

    def part(self, order: Sequence[int]) -> tuple[Self, list[int]]:
        """Select and reorder completions; also return their positions in this problem."""
        positions: list[int] = []
        offsets: list[int] = []
        for number in order:
            offsets.append(len(positions))
            start = self.offsets[number]
            positions += range(start, start + len(self.comparisons[number].student))
        comparisons = [self.comparisons[number] for number in order]
        part = replace(
            self, logits=self.logits[positions], comparisons=comparisons, offsets=offsets
        )
        return part, positions

    def renumbered(self, seed: int) -> tuple[Self, NDArray[np.int64]]:
        """Permute the ids of both vocabularies; also return the old student id of each new one."""
        draw = np.random.default_rng(seed)
        size, width = int(self.real.sum()), len(self.real)
        teachers = draw.permutation(self.teacher_size)
        students = teachers if self.one_vocabulary else draw.permutation(size)
        students = np.concatenate([students, np.arange(size, width)])
        new_student, new_teacher = students.argsort(), np.append(teachers.argsort(), -1)
        comparisons = [_renumbered(c, new_student, new_teacher) for c in self.comparisons]
        problem = replace(
            self,
            logits=self.logits[:, torch.tensor(students)],
            comparisons=comparisons,
            partner={int(new_teacher[j]): int(new_student[v]) for j, v in self.partner.items()},
            weights=self.weights[np.ix_(students, teachers)],
            first_tokens=np.append(new_student, -1)[self.first_tokens[teachers]],
        )
        return problem, students


def _renumbered(
    comparison: AlignedPair, new_student: NDArray[np.int64], new_teacher: NDArray[np.int64]
) -> AlignedPair:
    score, topk = comparison.score, comparison.score.topk
    assert isinstance(score, HiddenScore)
    return replace(
        comparison,
        student=with_ids(comparison.student, new_student[comparison.student.token_ids]),
        score=HiddenScore(
            score.manifest_id,
            with_ids(score.completion, new_teacher[score.completion.token_ids]),
            replace(topk, ids=new_teacher[topk.ids]),
            score.hidden[:, torch.tensor(new_teacher[:-1]).argsort()],
        ),
    )


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
    """Cut rows to ``kept`` entries each; pad short rows with missing entries."""
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
    draw: np.random.Generator, width: int, teacher_size: int, *, one_vocabulary: bool = False
) -> AlignedPair:
    """One completion; sometimes empty, sometimes ended, sometimes with texts that differ."""
    text = bytes(draw.choice(list(b"abc"), draw.integers(0, 7)).tolist())
    other = text if draw.random() < 0.8 else text[: len(text) // 2] + b"zz"
    end: list[Piece] = [END_OF_TURN] if draw.random() < 0.5 else []
    student = sequence([*cut(text, draw, 0.7), *end])
    teacher = sequence([*cut(other, draw, 0.5), *end])
    student = with_ids(student, draw.integers(0, width, len(student)))
    teacher = with_ids(teacher, draw.integers(0, teacher_size, len(teacher)))
    if one_vocabulary:
        teacher = student
    scale = draw.choice([0.5, 1.5])
    logits = draw.normal(size=(len(teacher), teacher_size)) * scale
    kept = draw.integers(0, teacher_size + 1, len(teacher)).tolist()
    sampled = np.log(draw.uniform(0.05, 0.9, size=len(student))).astype(np.float32)
    alignment = identity_alignment(len(student)) if one_vocabulary else align(student, teacher)
    return AlignedPair(student, sampled, score_of(teacher, logits, kept), alignment)


def score_of(teacher: TokenSequence, logits: Floats, kept: list[int]) -> HiddenScore:
    """Score a completion with logits [tokens, teacher size], which are the hidden states too."""
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    topk = topk_of(probabilities, teacher.token_ids, kept)
    return HiddenScore("teacher", teacher, topk, torch.tensor(logits))


def random_problem(
    seed: int, completions: int | None = None, *, one_vocabulary: bool = False
) -> Problem:
    """Any mix of spans, top-k sizes, shared ids, projections and padding."""
    draw = np.random.default_rng(seed)
    size, teacher_size = draw.integers(2, 7, size=2).tolist()
    teacher_size = size if one_vocabulary else teacher_size
    width = size + int(draw.integers(0, 3))
    if completions is None:
        completions = int(draw.integers(0, 4))
    comparisons = [
        random_comparison(draw, size, teacher_size, one_vocabulary=one_vocabulary)
        for _ in range(completions)
    ]
    offsets: list[int] = []
    positions = 0
    for comparison in comparisons:
        positions += int(draw.integers(0, 2))  # a completion of another teacher between
        offsets.append(positions)
        positions += len(comparison.student)
    positions += int(draw.integers(0, 2))
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
    if one_vocabulary:
        partner, weights = {i: i for i in range(size)}, np.eye(width, size)
    return Problem(
        first_tokens=np.arange(teacher_size) % (size + 1) - 1,
        logits=torch.tensor(draw.normal(size=(positions, width)) * draw.choice([0.5, 1.5])),
        real=np.arange(width) < size,
        comparisons=comparisons,
        offsets=offsets,
        teacher_size=teacher_size,
        partner=partner,
        weights=weights,
        one_vocabulary=one_vocabulary,
    )


def equal_problem(seed: int, kept: int, temperature: float = 1.0, size: int = 5) -> Problem:
    """Student and teacher are one model; the teacher sends ``kept`` ids at its temperature."""
    draw = np.random.default_rng(seed)
    completion = with_ids(sequence([b"a", b"bc", b"d", END_OF_TURN]), draw.integers(0, size, 4))
    logits = draw.normal(size=(4, size))
    score = score_of(completion, logits / temperature, [kept] * 4)
    sampled = np.full(4, -1.0, dtype=np.float32)
    return Problem(
        logits=torch.tensor(logits),
        real=np.ones(size, dtype=np.bool_),
        comparisons=[AlignedPair(completion, sampled, score, identity_alignment(4))],
        offsets=[0],
        teacher_size=size,
        partner={i: i for i in range(size)},
        weights=np.eye(size),
        one_vocabulary=True,
    )


def teacher_row(comparison: AlignedPair, row: int) -> TeacherRow:
    """Return the entries that the teacher sent for one token."""
    topk = comparison.score.topk
    sent = zip(topk.ids[row].tolist(), topk.logprobs[row].tolist(), strict=True)
    return TeacherRow(
        kept={j: float(np.exp(lp)) for j, lp in sent if j >= 0},
        rest=float(np.exp(float(topk.tail_logprobs[row]))),
        token=int(comparison.score.completion.token_ids[row]),
        token_probability=float(np.exp(float(topk.token_logprobs[row]))),
    )


def views(problem: Problem, temperature: float = 1.0) -> list[tuple[int, SpanView]]:
    """(first position, span) for every span; every logit is a variable."""
    real = problem.real.tolist()
    rows = [softmax(row, real, temperature) for row in variables(problem.logits.tolist())]
    spans: list[tuple[int, SpanView]] = []
    for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True):
        alignment, labels = comparison.alignment, comparison.student.token_ids.tolist()
        student = rows[offset : offset + len(labels)]
        teacher = [teacher_row(comparison, r) for r in range(len(comparison.score.completion))]
        columns = (
            alignment.student_starts,
            alignment.student_ends,
            alignment.teacher_starts,
            alignment.teacher_ends,
        )
        for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True):
            view = SpanView(
                student=student[a:b],
                labels=labels[a:b],
                teacher=teacher[c:d],
                next_student=student[b] if b < len(student) else None,
                next_teacher=teacher[d] if d < len(teacher) else None,
            )
            spans.append((offset + a, view))
    return spans


def scattered(problem: Problem, values: list[tuple[int, Dual]]) -> tuple[Floats, Floats]:
    """[positions] values, and the gradient [positions, width] of their sum."""
    per_token = np.zeros(len(problem.logits))
    gradient = np.zeros(problem.logits.numel())
    for position, value in values:
        per_token[position] += value.value
        gradient += value.slopes
    return per_token, gradient.reshape(problem.logits.shape)


def value_and_gradient(problem: Problem, output: LossOutput) -> tuple[Floats, Floats]:
    """The same of a loss; the problem's logits must require a gradient."""
    (gradient,) = torch.autograd.grad(output.per_token.sum(), problem.logits)
    return output.per_token.detach().numpy(), gradient.numpy()


def with_full_rows(targets: SpanTargets, teacher_logits: Tensor) -> SpanTargets:
    """Return the targets with every id of every row, most likely first, and an empty tail.

    Args:
        targets: of ``span_targets`` or ``mergeable_targets``.
        teacher_logits: [rows, teacher size].
    """
    logprobs = teacher_logits.log_softmax(dim=1)
    ordered, ids = logprobs.sort(dim=1, descending=True)
    return replace(
        targets,
        token_logprobs=logprobs.gather(1, targets.teacher_ids[:, None]).squeeze(1),
        topk_ids=ids.masked_fill(torch.isneginf(ordered), -1),
        topk_logprobs=ordered,
        tail_logprobs=torch.full_like(ordered[:, 0], -torch.inf),
    )
