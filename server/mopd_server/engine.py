"""What a teacher's engine does: token ids in, distributions over the next token out.

An engine knows nothing of text, HTTP or queues. ``TransformersEngine`` is one; another (vLLM) has
its place beside it as soon as it satisfies ``Engine``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mopd_protocol.arrays import IntArray
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True, eq=False)
class ScoringTask:
    """One sequence to score.

    ``prompt_ids`` is never empty: something must predict the first completion token.
    ``candidate_ids`` are unique within a row; a row may hold none.
    """

    prompt_ids: IntArray  # [prompt tokens]
    completion_ids: IntArray  # [rows]
    candidate_ids: tuple[IntArray, ...] | None = None  # rows x [candidates of that row]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What the manifest says about an engine and the model in it."""

    engine: str
    engine_version: str
    model: str
    revision: str
    dtype: str
    logit_width: int  # rows of the language-model head
    max_model_len: int  # tokens
    candidate_ids: bool
    temperature: bool


class Engine(Protocol):
    """Scores batches, one call at a time, on whatever thread it is called from."""

    @property
    def description(self) -> EngineDescription:
        """Who this engine is."""
        ...

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """One distribution per completion token of every task, in the order of ``batch``.

        Row ``r`` predicts completion token ``r``; an empty completion has no rows. Distributions
        are over the ids that have a token: the head's padding rows hold no probability. With
        ``candidate_ids`` exactly those entries are returned and ``top_k`` is not read.
        """
        ...
