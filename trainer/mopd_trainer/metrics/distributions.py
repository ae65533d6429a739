"""A teacher's entropy and top-k coverage, and an estimate of KL(student, teacher)."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.samples import Rollout
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.corrections import implausible_rows
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.tempering import tempered

#: A token is implausible if it is less than this times as likely as the teacher's likeliest one.
LEAST_RATIO = 0.01


def sampled_nats(rollout: Rollout, tokens: int | None = None) -> float:
    """Return the log-probability of a sampled completion under the sampling distribution, or of so
    many of its first tokens."""
    assert rollout.sampled_logprobs is not None
    return float(rollout.sampled_logprobs[:tokens].astype(np.float64).sum())


def known_entropy(topk: TopKLogprobs, temperature: float = 1.0) -> NDArray[np.float64]:
    """[rows], the entropy in nats of each row whose tail is one id.

    At temperature 1 that is a lower bound; at 0 it is 0.
    """
    if temperature == 0:
        return np.zeros(len(topk))
    every = np.column_stack([topk.logprobs, topk.tail_logprobs])
    logprobs = tempered(every, topk, temperature)
    return -(np.exp(logprobs) * logprobs).sum(axis=1)


def teacher_distribution_metrics(
    scored: Sequence[tuple[TrainingExample, AlignedScore]],
    *,
    vocabulary: int,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Return the bounds of the teacher's entropy, the estimate of KL(student, teacher), the share
    of implausible tokens, and the probability of the teacher's top-k, of its rows.

    The tail of a row has probability t and at most ``vocabulary - k`` ids. Its share of the
    entropy is ``-t log t`` if it is one id, and ``t log(vocabulary - k)`` more if it is uniform.

    The estimate is the mean of ``log p(completion) - log q(completion)`` over completions sampled
    from p, divided by the student's tokens, with both sides at the sampling temperature. Tokens
    that could not be sent to the teacher do not count. A completion's probability is that of its
    tokens on either side, so that it is unbiased up to other tokenizations of the same text.

    Args:
        vocabulary: ids of the teacher.
        temperature: of the samples. Greedy ones are compared with the teacher at 1.
    """
    low = high = nats = 0.0
    rows = tokens = implausible = sampled_rows = 0
    rests = [np.zeros(0)]
    for example, aligned in scored:
        topk = aligned.score.topk
        known = known_entropy(topk)
        rest = np.exp(topk.tail_logprobs.astype(np.float64))
        rests.append(rest)
        low += float(known.sum())
        high += float((known + rest * math.log(max(vocabulary - topk.k, 1))).sum())
        rows += len(topk)
        if example.rollout.source == "rollout":
            logprobs = tempered(aligned.score.logprobs, topk, temperature or 1.0)
            sent = aligned.teacher_input.sent_tokens
            nats += sampled_nats(example.rollout, sent) - float(logprobs.sum())
            tokens += sent
            implausible += len(implausible_rows(aligned.score, LEAST_RATIO))
            sampled_rows += len(topk)
    missing = math.nan
    masses = 1 - np.concatenate(rests)
    return {
        "entropy_low": low / rows if rows else missing,
        "entropy_high": high / rows if rows else missing,
        "reverse_kl_estimate": nats / tokens if tokens else missing,
        "implausible_share": implausible / sampled_rows if sampled_rows else missing,
        "topk_mass_mean": float(masses.mean()) if rows else missing,
        "topk_mass_p1": float(np.percentile(masses, 1)) if rows else missing,
    }
