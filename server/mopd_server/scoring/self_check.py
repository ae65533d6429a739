"""Self-check at startup: a sequence must get equal scores in any batch.

Faults of batching are silent: rows of another sequence, a shift by one, padding that is attended
to. The sequences are random tokens, whose rows differ by far more than rounding. And a row must not
depend on later tokens: the language-model head of an encoder scores tokens that it has seen.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from mopd_protocol.arrays import FloatArray, IntArray
from mopd_protocol.errors import TeacherError
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineDescription, ScoringTask
from mopd_server.scoring.scorer import Scorer

#: Maximum difference in nats from rounding in batches of different shapes. The spacing of logits
#: from 16 to 32 is 1/8 in bfloat16 and 1/64 in float16; float32 may use TF32 kernels.
TOLERANCES = {"float32": 1e-2, "float16": 1e-1, "bfloat16": 5e-1}

_PROBE_TOKENS = 24
_BATCH_TOKENS = (9, 40, 17)
_TOP_K = 8


class SelfCheckError(TeacherError):
    """Two scores of one sequence differ; ``key`` names the pair."""

    code = "self_check_failed"


async def check_engine(
    scorer: Scorer[Any], description: EngineDescription, real_ids: IntArray, *, max_top_k: int
) -> None:
    """Score a known sequence unbatched, in a batch, and with its most likely ids as candidates.

    Args:
        scorer: the engine behind its queue.
        description: its dtype selects the tolerance, its features the checks.
        real_ids: ``[ids]``, the ids that have a token.
        max_top_k: maximum ``top_k`` of the engine.

    Raises:
        SelfCheckError: if two scores of the sequence differ by more than the tolerance.
        ServiceError: if the engine fails.
    """
    generator = np.random.default_rng(0)
    probe, *others = (
        _sequence(generator, real_ids, min(tokens, description.max_model_len))
        for tokens in (_PROBE_TOKENS, *_BATCH_TOKENS)
    )
    top_k = min(_TOP_K, max_top_k)
    tolerance = TOLERANCES.get(description.dtype, max(TOLERANCES.values()))
    ((single, _),) = await scorer.score([probe], top_k=top_k, temperature=1.0)
    adapted = [replace(probe, adapter=adapter.name) for adapter in description.adapters]
    _, (batched, _), *rest = await scorer.score(
        [others[0], probe, *adapted, *others[1:]], top_k=top_k, temperature=1.0
    )
    _require_close(single, batched, tolerance, "batching")
    kept = (len(probe.completion_ids) + 1) // 2
    start = ScoringTask(probe.prompt_ids, probe.completion_ids[:kept])
    ((shorter, _),) = await scorer.score([start], top_k=top_k, temperature=1.0)
    _require_close(single.rows(0, kept), shorter, tolerance, "later tokens")
    for task, (batched, _) in zip(adapted, rest, strict=False):
        ((unbatched, _),) = await scorer.score([task], top_k=top_k, temperature=1.0)
        _require_close(unbatched, batched, tolerance, f"adapter {task.adapter}")
    if description.candidate_ids:
        candidates = tuple(np.sort(row[row >= 0]) for row in single.ids)
        task = ScoringTask(probe.prompt_ids, probe.completion_ids, candidates)
        ((by_candidates, _),) = await scorer.score([task], top_k=top_k, temperature=1.0)
        _require_close(single, by_candidates, tolerance, "candidate_ids")


def _sequence(generator: np.random.Generator, real_ids: IntArray, tokens: int) -> ScoringTask:
    """Return random tokens, a third of them (at least one) as the prompt."""
    ids = generator.choice(real_ids, size=tokens).astype(np.int32)
    prompt = max(1, tokens // 3)
    return ScoringTask(ids[:prompt], ids[prompt:])


def _require_close(first: TopKLogprobs, second: TopKLogprobs, tolerance: float, key: str) -> None:
    difference = max(
        _max_difference(left, right)
        for left, right in (
            (first.token_logprobs, second.token_logprobs),
            # Ids are not compared: rounding may swap two of nearly equal probability.
            (first.logprobs, second.logprobs),
        )
    )
    if not difference <= tolerance:
        raise SelfCheckError(
            f"self-check of {key}: log-probabilities of one sequence differ (found "
            f"{difference:.3g} nats, expected at most {tolerance:g}, which rounding explains)",
            key=key,
        )


def _max_difference(left: FloatArray, right: FloatArray) -> float:
    if left.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # -inf minus -inf
        return float(np.where(left == right, 0.0, np.abs(left - right)).max(initial=0.0))
