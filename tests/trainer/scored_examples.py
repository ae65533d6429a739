"""Training examples whose teachers are made up: any numbers that are a distribution will do."""

from collections.abc import Mapping, Sequence

import numpy as np

from mopd_losses.alignment.byte_alignment import align, identity_alignment
from mopd_losses.build import build_loss
from mopd_losses.config import CtkdConfig, TopKKlConfig
from mopd_losses.core.loss import AlignedPair, Loss
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.teacher_input import text_view, token_view
from mopd_trainer.student.student import Student
from tests.trainer.students import encoder, encoder_without_bytes, table, tokenizer

#: Teacher -> its tokenizer. The student's is ``digit``: ``math`` reads its very ids.
TOKENIZERS = {"math": "digit", "code": "whole_number"}
TOP_K = 8


def example(rollout: Rollout, *, seed: int = 0) -> TrainingExample:
    """Return the rollout with made-up scores of each of its teachers."""
    return TrainingExample(
        rollout,
        tuple(
            _aligned_score(name, weight, rollout, seed + position)
            for position, (name, weight) in enumerate(rollout.prompt.teachers.items())
        ),
    )


def losses_for(student: Student, divergences: Mapping[str, str] | None = None) -> dict[str, Loss]:
    """The losses of ``TOKENIZERS`` for a student with the ``digit`` tokenizer."""
    actual: dict[str, Loss] = {}
    for name, tokenizer_name in TOKENIZERS.items():
        divergence = (divergences or {}).get(name, "forward_kl")
        kind = TopKKlConfig if name == "math" else CtkdConfig
        config = kind.model_validate({"divergence": divergence})
        teacher = teacher_tokenizer(tokenizer_name)
        actual[name] = build_loss(config, student.identity, teacher, student.device)
    return actual


def teacher_tokenizer(name: str) -> TeacherTokenizer:
    """Return a tiny tokenizer, as that of a teacher."""
    return TeacherTokenizer(tokenizer(name).backend_tokenizer, table(name), encoder(name))


def topk_of(completion: TokenSequence, vocabulary: Sequence[int], seed: int) -> TopKLogprobs:
    """Random distributions, of which the ``TOP_K`` most likely entries are returned."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(len(completion), len(vocabulary))) * 2
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-logprobs, axis=1)[:, :TOP_K]
    kept = np.take_along_axis(logprobs, best, axis=1)
    return TopKLogprobs(
        ids=np.array(vocabulary)[best],
        logprobs=kept,
        token_logprobs=np.full(len(completion), -1.0),
        tail_logprobs=np.log1p(-np.exp(kept).sum(axis=1)),
    )


def _aligned_score(name: str, weight: float, rollout: Rollout, seed: int) -> AlignedScore:
    own = table(TOKENIZERS[name])
    if name == "math":
        view, completion = token_view(rollout), rollout.completion
        alignment = identity_alignment(len(completion))
    else:
        view = text_view(rollout, table("digit"), encoder_without_bytes(TOKENIZERS[name]))
        completion = teacher_tokenizer(TOKENIZERS[name]).completion(view.request)
        alignment = align(view.completion, completion)
    topk = topk_of(completion, own.present.nonzero()[0].tolist(), seed)
    return AlignedScore(name, weight, view, TeacherScore("m" * 32, completion, topk), alignment)


def aligned_pair(item: TrainingExample, score: AlignedScore) -> AlignedPair:
    """One teacher's score of a completion, as losses read it."""
    completion = score.teacher_input.completion
    return AlignedPair(completion, item.rollout.sampled_logprobs, score.score, score.alignment)
