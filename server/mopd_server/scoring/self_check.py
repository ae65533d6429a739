"""Whether an engine scores the same sequence alike alone and in company, asked before it serves.

Batching is where scores go wrong silently: rows of a neighbour, a shift by one, padding that is
read. The sequences are random tokens, whose rows differ from each other by far more than rounding.
"""

import numpy as np

from mopd_protocol.arrays import FloatArray, IntArray
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineDescription, ScoringTask
from mopd_server.scoring.scorer import SequenceScorer

#: Largest difference, in nats, that batches of other shapes may make by rounding alone. Logits of
#: 16 to 32 are 1/8 apart in bfloat16 and 1/64 in float16; float32 may pass through TF32 kernels.
TOLERANCES = {"float32": 1e-2, "float16": 1e-1, "bfloat16": 5e-1}

_PROBE_TOKENS = 24
_NEIGHBOUR_TOKENS = (9, 40, 17)
_TOP_K = 8


class SelfCheckError(RuntimeError):
    """The engine contradicts itself."""


async def check_engine(
    scorer: SequenceScorer, about: EngineDescription, real_ids: IntArray, *, max_top_k: int
) -> None:
    """Scores a known sequence alone and inside a batch, and its likeliest ids as candidates.

    Args:
        scorer: the engine, behind its queue.
        about: its dtype decides the tolerance, its features what is asked.
        real_ids: ``[ids]``, those that have a token.
        max_top_k: the largest ``top_k`` that the engine takes.

    Raises:
        SelfCheckError: when two answers about one sequence differ by more than the tolerance.
        ServiceError: when the engine fails.
    """
    draw = np.random.default_rng(0)
    probe, *neighbours = (
        _sequence(draw, real_ids, min(tokens, about.max_model_len))
        for tokens in (_PROBE_TOKENS, *_NEIGHBOUR_TOKENS)
    )
    top_k = min(_TOP_K, max_top_k)
    tolerance = TOLERANCES.get(about.dtype, max(TOLERANCES.values()))
    ((alone, _),) = await scorer.score([probe], top_k=top_k, temperature=1.0)
    _, (in_company, _), *_ = await scorer.score(
        [neighbours[0], probe, *neighbours[1:]], top_k=top_k, temperature=1.0
    )
    _require_close(alone, in_company, tolerance, "alone and inside a batch")
    if about.candidate_ids:
        candidates = tuple(np.sort(row[row >= 0]) for row in alone.ids)
        asked = ScoringTask(probe.prompt_ids, probe.completion_ids, candidates)
        ((chosen, _),) = await scorer.score([asked], top_k=top_k, temperature=1.0)
        _require_close(alone, chosen, tolerance, "by top_k and by candidate_ids")


def _sequence(draw: np.random.Generator, real_ids: IntArray, tokens: int) -> ScoringTask:
    """A third is prompt, and at least one token."""
    ids = draw.choice(real_ids, size=tokens).astype(np.int32)
    prompt = max(1, tokens // 3)
    return ScoringTask(ids[:prompt], ids[prompt:])


def _require_close(first: TopKLogprobs, second: TopKLogprobs, tolerance: float, ways: str) -> None:
    difference = max(
        _largest_difference(one, other)
        for one, other in (
            (first.token_logprobs, second.token_logprobs),
            # Ids are not compared: rounding may swap two that are nearly as likely.
            (first.logprobs, second.logprobs),
        )
    )
    if not difference <= tolerance:
        raise SelfCheckError(
            f"the engine scored one sequence {ways}, and the log-probabilities differ by "
            f"{difference:.3g} nats; expected at most {tolerance:g}, which rounding explains"
        )


def _largest_difference(one: FloatArray, other: FloatArray) -> float:
    if one.shape != other.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        return float(np.where(one == other, 0.0, np.abs(one - other)).max(initial=0.0))
