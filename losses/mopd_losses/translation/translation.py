"""``Translation``: a teacher's scores in the student's ids, and their coverage."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True)
class ExtraRow:
    """A row of the teacher that its score of a completion does not have: what follows the first
    ``teacher_tokens`` tokens of the completion and then ``token_ids``."""

    completion: int  # index of the completion
    teacher_tokens: int
    token_ids: tuple[int, ...]  # the teacher's


@dataclass(frozen=True, eq=False)
class Coverage:
    """The parts of a teacher's distribution that have a name in the student's vocabulary."""

    named_mass: NDArray[np.float32]  # [rows], probability of all named entries
    lost_top1: NDArray[np.bool_]  # [rows], the teacher's likeliest text is in the tail
    has_signal: NDArray[np.bool_]  # [rows], False where nothing is known: no entry, all of it tail


@dataclass(frozen=True, eq=False)
class Translation:
    """A teacher's scores of one completion, in the student's ids.

    Row ``r`` of ``topk`` predicts student token ``r``: ``token_logprobs`` is the probability of
    the realised token's text, the entries are the tokens that the scores determine, and
    ``tail_logprobs`` is all other mass.
    """

    topk: TopKLogprobs
    coverage: Coverage
