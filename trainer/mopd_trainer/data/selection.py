"""``TokenSelection``: which tokens of a sampled completion teachers score, and their losses train.

With ``n`` tokens at most ``first``, the ``ceil(share * n)`` tokens with the largest entropy, or
divergence, are selected; of equal ones the first. With ``prefix_entropy`` that are the fewest first
tokens with ``share`` of the sum of the entropies.
"""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Rollout
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.tokens import TokensConfig
from mopd_trainer.data.examples import AlignedScore, BoolArray
from mopd_trainer.data.tempering import tempered

_ALL = TokensConfig()


@dataclass(frozen=True)
class TokenSelection:
    """Selects tokens of the completions that the student ``student`` samples."""

    student: TokenTable
    config: TokensConfig = _ALL
    temperature: float = 1.0
    """Sampling temperature, at which student and teachers are compared."""

    def sent(self, rollout: Rollout) -> Rollout:
        """Return the beginning of a completion that teachers score.

        Raises:
            DataError: when the entropies are not known.
        """
        if rollout.sampled_logprobs is None:
            return rollout
        tokens = self._first(rollout)
        if self.config.keeps_entropies and tokens:
            tokens = int(np.flatnonzero(self._by_entropy(rollout))[-1]) + 1
        return first_tokens(rollout, tokens, self.student)

    def selected(self, rollout: Rollout, score: AlignedScore) -> AlignedScore:
        """Return a score of the beginning of a completion with the tokens to train."""
        sent = len(score.teacher_input.completion)
        if rollout.sampled_logprobs is None or self.config == _ALL:
            return score
        tokens = min(sent, self._first(rollout))
        selected = np.zeros(sent, dtype=np.bool_)
        if self.config.share == 1:
            selected[:tokens] = True
        elif self.config.keeps_entropies:
            selected[:tokens] = self._by_entropy(rollout)[:tokens]
        else:
            values = divergences(rollout, score, self.temperature)[:tokens]
            selected[:tokens] = largest(values, self.config.share)
        return replace(score, selected=selected)

    def _first(self, rollout: Rollout) -> int:
        tokens = len(rollout.completion)
        return tokens if self.config.first is None else min(tokens, self.config.first)

    def _by_entropy(self, rollout: Rollout) -> BoolArray:
        if rollout.entropies is None:
            raise DataError(
                f"prompt {rollout.prompt.index}: tokens cannot be selected by entropy, which this "
                "completion lacks. Record the run with tokens.by 'entropy', or set it to "
                "'divergence'.",
                key="tokens.by",
            )
        entropies = rollout.entropies[: self._first(rollout)]
        if self.config.by == "entropy":
            return largest(entropies, self.config.share)
        before = np.concatenate([[0.0], np.cumsum(entropies, dtype=np.float64)])
        selected = before[:-1] < self.config.share * before[-1]
        selected[:1] = True
        return selected


def largest(values: NDArray[np.floating], share: float) -> BoolArray:
    """Return bool [tokens], True for the largest values; of equal ones for the first."""
    # Rounded, so that 0.1 of 10 tokens is 1, and not the next integer above 1.0000000000000002.
    count = ceil(round(share * len(values), 9))
    selected = np.zeros(len(values), dtype=np.bool_)
    selected[np.argsort(-values, kind="stable")[:count]] = True
    return selected


def divergences(rollout: Rollout, score: AlignedScore, temperature: float) -> NDArray[np.float64]:
    """Return the absolute difference of both log-probabilities per token, [tokens]; 0 outside of
    aligned spans."""
    assert rollout.sampled_logprobs is not None
    spans, topk = score.alignment, score.score.topk
    teacher = tempered(score.score.logprobs, topk, temperature or 1.0)
    student = rollout.sampled_logprobs.astype(np.float64)
    teacher, student = (np.concatenate([[0.0], np.cumsum(each)]) for each in (teacher, student))
    differences = np.abs(
        student[spans.student_ends]
        - student[spans.student_starts]
        - teacher[spans.teacher_ends]
        + teacher[spans.teacher_starts]
    )
    lengths = spans.student_ends - spans.student_starts
    values = np.zeros(len(rollout.completion))
    for start, end, value in zip(
        spans.student_starts, spans.student_ends, differences / lengths, strict=True
    ):
        values[start:end] = value
    return values


def first_tokens(rollout: Rollout, tokens: int, table: TokenTable) -> Rollout:
    """Return a rollout with the first tokens of its completion, which then has no end."""
    if tokens >= len(rollout.completion):
        return rollout
    sampled, topk_ids = rollout.sampled_logprobs, rollout.student_topk_ids
    return replace(
        rollout,
        completion=table.sequence(rollout.completion.token_ids[:tokens].tolist()),
        sampled_logprobs=None if sampled is None else sampled[:tokens],
        student_topk_ids=None if topk_ids is None else topk_ids[:tokens],
        entropies=None if rollout.entropies is None else rollout.entropies[:tokens],
        corrected_tokens=tuple(at for at in rollout.corrected_tokens if at < tokens),
        finish_reason="length",
    )
