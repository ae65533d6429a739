"""A minimal engine: uniform distributions over the ids that have a token."""

import math
from collections.abc import Sequence

import numpy as np

from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineDescription, ScoringTask
from mopd_server.settings import TeacherSettings


def is_available(settings: TeacherSettings) -> bool:
    """Return False: only used on request."""
    return False


def load_engine(settings: TeacherSettings, table: TokenTable) -> "UniformEngine":
    """Return the engine for the ids of a tokenizer."""
    return UniformEngine(np.flatnonzero(table.present).astype(np.int32), settings.model)


class UniformEngine:
    """An ``Engine`` without a model."""

    def __init__(self, ids: np.ndarray, model: str) -> None:
        self._ids = ids
        self.description = EngineDescription(
            engine="uniform",
            engine_version="1",
            model=model,
            revision="none",
            dtype="float32",
            logit_width=int(ids.max()) + 1,
            max_model_len=1024,
            candidate_ids=False,
            temperature=True,
        )

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Return the ``top_k`` smallest ids with equal probability for every row."""
        return [self._rows(len(task.completion_ids), top_k) for task in batch]

    def _rows(self, rows: int, top_k: int) -> TopKLogprobs:
        logprob, tail = -math.log(len(self._ids)), 1 - top_k / len(self._ids)
        return TopKLogprobs(
            ids=np.tile(self._ids[:top_k], (rows, 1)),
            logprobs=np.full((rows, top_k), logprob, dtype=np.float32),
            token_logprobs=np.full(rows, logprob, dtype=np.float32),
            tail_logprobs=np.full(rows, math.log(tail) if tail else -math.inf, dtype=np.float32),
        )
