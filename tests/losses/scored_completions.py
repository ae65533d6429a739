"""Completions of two tokenizations with random scores of a teacher."""

import numpy as np

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.core.loss import AlignedPair
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.sequences import Piece, sequence

STUDENT_SIZE = 7
TEACHER_SIZE = 6

#: Student and teacher tokens of three texts: one-to-one, one-to-many and many-to-one spans.
TEXTS: tuple[tuple[list[Piece], list[Piece]], ...] = (
    ([b"a", b"b", b"cd", END_OF_TURN], [b"ab", b"c", b"d", END_OF_TURN]),
    ([b"x", b"yz", b"x"], [b"x", b"y", b"z", b"x"]),
    ([b"a", b"b", b"c", b"d", b"e"], [b"a", b"bc", b"d", b"e"]),
)


def with_ids(pieces: list[Piece], size: int, draw: np.random.Generator) -> TokenSequence:
    """The pieces as tokens of random ids below ``size``."""
    plain = sequence(pieces)
    ids = draw.integers(0, size, size=len(plain))
    return TokenSequence(ids, plain.byte_ends, plain.text, plain.marks)


def scored(text: int, seed: int, k: int = 2) -> AlignedPair:
    """One of ``TEXTS``, sampled and scored at random."""
    draw = np.random.default_rng([seed, text])
    student = with_ids(TEXTS[text][0], STUDENT_SIZE, draw)
    teacher = with_ids(TEXTS[text][1], TEACHER_SIZE, draw)
    logprobs = np.log(draw.dirichlet(np.ones(TEACHER_SIZE), size=len(teacher)).clip(1e-9))
    order = np.argsort(-logprobs, axis=1)[:, :k]
    kept = np.take_along_axis(logprobs, order, axis=1)
    topk = TopKLogprobs(
        ids=order,
        logprobs=kept,
        token_logprobs=logprobs[np.arange(len(teacher)), teacher.token_ids],
        tail_logprobs=np.log(np.maximum(1 - np.exp(kept).sum(axis=1), 1e-9)),
    )
    return AlignedPair(
        student=student,
        sampled_logprobs=np.log(draw.uniform(0.05, 0.9, size=len(student))).astype(np.float32),
        score=TeacherScore("a manifest", teacher, topk),
        alignment=align(student, teacher),
    )


def several(seed: int) -> tuple[list[AlignedPair], list[int], int]:
    """Two scored completions, separated by positions of a third; offsets; number of positions."""
    comparisons = [scored(0, seed), scored(2, seed)]
    return comparisons, [0, 7], 12
