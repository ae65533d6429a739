"""Two models that are equally sure of one text, through pairs of real tiny tokenizers."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.contract import Row, TokenizationClass
from tests.losses.prefix_pairs import END, Pair, Tongue, compared
from tests.losses.prefix_problems import PrefixProblem

#: Probability of all other ids together at every position.
UNSURE = 1e-7

TEXTS = {"one_to_one": ("aabab", "aaaa"), "longest_match": ("aabab", "abbaa"), "any": ("3343",)}


@cache
def pairs(name: TokenizationClass) -> tuple[Pair, ...]:
    """Return tokenizer pairs of a class that are in no smaller class."""
    if name == "one_to_one":
        return (Pair(Tongue.of("ab", "aa"), Tongue.of("ab", "aa", end="<stop>")),)
    if name == "longest_match":
        return (
            Pair(Tongue.of("aa", "ab", "aba"), Tongue.of(end="<stop>")),
            Pair(Tongue.of(), Tongue.of("aa", "ab", "aba", end="<stop>")),
            Pair(Tongue.of("ab", "abb", "ba"), Tongue.of("bb", "bba", "aa", end="<stop>")),
        )
    # Both know 334 and 343, and cut 3343 into 3|343 and 334|3.
    words = ("343", "334")
    return (
        Pair(
            Tongue.of(*words, by_merges=True),
            Tongue.of(*reversed(words), end="<stop>", by_merges=True),
        ),
    )


def difference(row: Row, name: TokenizationClass) -> float:
    """Return the largest absolute value of a loss between two models sure of the same text."""
    largest = 0.0
    for pair in pairs(name):
        pair = Pair(pair.student, pair.student) if row.one_tokenizer else pair
        loss = row.between(pair.student, pair.teacher)
        for text in TEXTS[name]:
            student, teacher = (
                tongue.ids([*tongue.tokenize(text), END]) for tongue in (pair.student, pair.teacher)
            )
            comparison = scored(row, pair, student, teacher, sure_rows(pair.teacher, teacher))
            rows = DenseRows(sure_rows(pair.student, student), pair.real_ids)
            per_token = loss(rows, loss.targets([comparison], [0])).per_token
            largest = max(largest, per_token.abs().max().item())
    return largest


def sure_rows(tongue: Tongue, ids: list[int]) -> Tensor:
    """[tokens, width], log-probabilities of a model that is sure of ``ids``."""
    real = torch.tensor(tongue.table.real_ids(tongue.logit_width))
    rows = torch.full((len(ids), tongue.logit_width), -torch.inf, dtype=torch.float64)
    rows[:, real] = np.log(UNSURE / (int(real.sum()) - 1))
    rows[torch.arange(len(ids)), ids] = np.log1p(-UNSURE)
    return rows


def scored(
    row: Row, pair: Pair, student_ids: list[int], teacher_ids: list[int], teacher: Tensor
) -> AlignedPair:
    """Return an aligned pair with the teacher's three most likely ids, and hidden states."""
    comparison = compared(pair, student_ids, teacher_ids, teacher, k=3)
    if not row.name.startswith("full_vocabulary"):
        return comparison
    score: Any = comparison.score
    columns = {name: getattr(score.topk, name) for name in TopKLogprobs.__dataclass_fields__}
    hidden = teacher.clamp_min(-60)
    full = HiddenScore("teacher", score.completion, TopKLogprobs(**columns), hidden)
    return AlignedPair(comparison.student, comparison.sampled_logprobs, full, comparison.alignment)


def equal_problem(seed: int) -> PrefixProblem:
    """One model with one real tokenizer on both sides."""
    tongue = Tongue.of("ab", "aa")
    pair = Pair(tongue, tongue)
    ids = tongue.ids([*tongue.tokenize("aabab"), END])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(ids), tongue.logit_width, generator=generator, dtype=torch.float64)
    logprobs = logits.masked_fill(~pair.real_ids, -torch.inf).log_softmax(dim=1)
    return PrefixProblem(
        logits=logits,
        real=pair.real_ids.numpy(),
        comparisons=[compared(pair, ids, ids, logprobs, k=3)],
        offsets=[0],
        teacher_size=tongue.table.size,
        partner={},
        weights=np.zeros((0, 0)),
        one_vocabulary=True,
        pair=pair,
    )
