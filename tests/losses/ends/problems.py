"""Completions of two models of one vocabulary that end with different tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mopd_losses.alignment.byte_alignment import identity_alignment
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.tokenizers.token_table import TokenRoles
from tests.losses.families import Family, family, family_of
from tests.losses.problems import topk_of

#: Control tokens of the tokenizer: two ends, then three that begin messages.
FIRST, SECOND, THIRD, FOURTH = range(4)


@cache
def side(*ends: int) -> Family:
    """The tokenizer ``digit`` of a model that ends with these ids."""
    roles = TokenRoles(eos=ends[0], end_of_turn=ends[0], other_ends=ends[1:])
    return family_of(family("digit").tokenizer, roles, padding=0)


@dataclass(frozen=True, eq=False)
class Ends:
    """A student and its teacher: the same model, up to which ids the tokens have.

    Args:
        renamed: student id -> teacher id of the same event, for all that differ.
    """

    own: tuple[int, ...]
    others: tuple[int, ...]
    renamed: Mapping[int, int]

    @property
    def student(self) -> Family:
        return side(*self.own)

    @property
    def teacher(self) -> Family:
        return side(*self.others)


#: Students and teachers that are equal, although their tokens are not.
EQUAL: dict[str, Ends] = {
    "one token": Ends((FIRST,), (FIRST,), {}),
    "other tokens": Ends((FIRST,), (SECOND,), {FIRST: SECOND, SECOND: FIRST}),
    "the same two": Ends((FIRST, SECOND), (FIRST, SECOND), {}),
    "the same two, with the other one preferred": Ends(
        (FIRST, SECOND), (FIRST, SECOND), {FIRST: SECOND, SECOND: FIRST}
    ),
    "the same two in another order": Ends(
        (FIRST, SECOND), (SECOND, FIRST), {FIRST: SECOND, SECOND: FIRST}
    ),
    "two other tokens": Ends(
        (FIRST, SECOND),
        (THIRD, FOURTH),
        {FIRST: THIRD, THIRD: FIRST, SECOND: FOURTH, FOURTH: SECOND},
    ),
}


def random_logits(rows: int, seed: int) -> Tensor:
    """Rows [rows, ids] with probable ends, in float64."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, family("digit").table.size, generator=draw, dtype=torch.float64)
    logits[:, :4] += 3
    return logits


def text_ids(ordinary: Sequence[int] = ()) -> list[int]:
    """Ids of a text, with ordinary control tokens in the middle."""
    ids = family("digit").encoder.encode("12 + 30 = 42 the quick")
    return [*ids[:3], *ordinary, *ids[3:]]


def teacher_rows(logits: Tensor, renamed: Mapping[int, int]) -> Tensor:
    """The logits of a teacher that gives ``renamed[id]`` what the student gives ``id``."""
    rows = logits.clone()
    for student_id, teacher_id in renamed.items():
        rows[:, teacher_id] = logits[:, student_id]
    return rows


def pair_of(
    ends: Ends, logits: Tensor, teacher: Tensor, *, k: int, ordinary: Sequence[int] = ()
) -> AlignedPair:
    """A completion with its end, sampled by the student, with the teacher's score."""
    ids = text_ids(ordinary)
    student_ids = np.array([*ids, ends.own[-1]])
    teacher_ids = np.array([*(ends.renamed.get(each, each) for each in ids), ends.others[0]])
    rows, at = len(ids) + 1, np.arange(len(ids) + 1)
    probabilities = teacher.softmax(dim=1).numpy()
    topk = topk_of(probabilities, teacher_ids, [k] * rows)
    topk = replace(topk, token_logprobs=np.log(probabilities[at, teacher_ids]))
    sampled = logits.log_softmax(dim=1).numpy()[at, student_ids]
    completion = ends.teacher.table.sequence(teacher_ids)
    return AlignedPair(
        ends.student.table.sequence(student_ids),
        sampled.astype(np.float32),
        HiddenScore("manifest", completion, topk, teacher),
        identity_alignment(rows),
    )


def rows_of(logits: Tensor) -> DenseRows:
    """The student."""
    return DenseRows(logits, torch.ones(logits.shape[1], dtype=torch.bool))
