"""The end of a turn is one event for each loss, of all tokens that student and teacher end with."""

import math
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import torch

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import TopKKlConfig
from mopd_losses.core.loss import AlignedPair, Loss
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.teachers.connect import Teacher

#: Probability of the end of both models.
_END = 0.999
#: Largest loss, in nats, of two models that give it the same probability, and least loss of a
#: student that gives it to a token that ends completions of the teacher only.
_LIMIT, _LEAST = 1e-3, 0.1


def check_ends(teachers: Mapping[str, Teacher], losses: Mapping[str, Loss]) -> Iterator[Finding]:
    """Yield a finding per teacher: equal models that end with any of their tokens have no loss."""
    for name, teacher in teachers.items():
        own, others = teacher.student.table.roles.ending, teacher.tokenizer.table.roles.ending
        if not others:
            text = f"teacher {name!r} has no token that ends a completion; it cannot teach the end."
            yield Finding("ends", "failed", text, "Set the eos_token of its tokenizer.")
            continue
        loss = losses[name]
        text = teacher.differing_ends() or f"student and teacher {name!r} end with the same tokens"
        if isinstance(loss, FullVocabularyLoss):  # of rows of the teacher's head, not of a top-k
            yield Finding("ends", "ok", f"{text}.")
            continue
        equal = max(_loss(loss, teacher, *pair) for pair in product(own, others))
        # Losses on samples, or on texts, do not read a token that was not sampled.
        compares_ids = isinstance(teacher.config.loss, TopKKlConfig)
        ordinary = {*others} - {*own} if compares_ids else set[int]()
        wrong = min((_loss(loss, teacher, each, each) for each in ordinary), default=math.inf)
        text += f"; equal models differ by at most {equal:.2g} nats at the end."
        status = "ok" if equal <= _LIMIT and wrong >= _LEAST else "failed"
        fix = "Use another loss: this one teaches a token that does not end completions."
        yield Finding("ends", status, text, fix, {"nats": equal})


def _loss(loss: Loss, teacher: Teacher, student_id: int, teacher_id: int) -> float:
    """Return the loss, in nats, of a completion that is only its end, where both models are sure of
    one token each."""
    student, table = teacher.student, teacher.tokenizer.table
    top_k = max(teacher.config.top_k, 2)
    ids = np.full((1, top_k), ABSENT_ID)
    logprobs = np.full((1, top_k), -np.inf)
    ids[0, 0], logprobs[0, 0] = teacher_id, np.log(_END)
    own = table.sequence([table.roles.ending[0]])
    token = logprobs[0] if own.token_ids[0] == teacher_id else [-np.inf]
    topk = TopKLogprobs(ids, logprobs, np.array(token[:1]), np.log([1 - _END]))
    ending = student.table.roles.ending
    completion = student.table.sequence([student_id if student_id in ending else ending[0]])
    score = TeacherScore(teacher.manifest.manifest_id, own, topk)
    alignment = align(completion, own)
    pair = AlignedPair(completion, np.log([_END], dtype=np.float32), score, alignment)
    real = torch.from_numpy(student.table.real_ids(student.logit_width))
    rest = (1 - _END) / max(int(real.sum()) - 1, 1)
    logits = torch.full((1, student.logit_width), rest).log()
    logits[0, student_id] = np.log(_END)
    targets = loss.targets([pair], [0])
    return float(loss(DenseRows(logits, real), targets).per_token.abs().sum())
