"""``Translation``: scores of a teacher in the ids of a student with another tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.samples import Message
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True)
class CoverageReport:
    """Coverage of one sequence's distributions; the field ``mopd_coverage`` of a choice."""

    prompt_tokens: int
    """Positions of the prompt. Their distributions are unknown."""
    positions: int
    """Positions behind the prompt."""
    without_signal: int
    """Positions behind the prompt whose distributions are unknown."""
    named_mass: float | None
    """Mean probability of the named tokens where the distribution is known; null if none is."""
    lost_top1: int
    """Positions where the teacher's likeliest text is in the tail."""
    extra_rows: int
    """Rows that were requested from the teacher besides those of the completion."""


@dataclass(frozen=True, eq=False)
class TranslatedPrompt:
    """Distributions at the positions of one sequence of ``n`` ids."""

    topk: TopKLogprobs  # row r predicts id r + 1, [n - 1, k]
    unknown: NDArray[np.bool_]  # [n - 1], rows without entries
    unscored: NDArray[np.bool_]  # [n - 1], rows that mean nothing, such as those of the prompt
    coverage: CoverageReport


class Translation(Protocol):
    """Scores sequences of the student's ids."""

    @property
    def student(self) -> RequestTokenizer:
        """The student's tokenizer."""
        ...

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message] | None],
        *,
        field: str,
        top_k: int,
        adapter: str | None,
        admit: Callable[[int, int], None] | None,
        key: str,
    ) -> tuple[list[TranslatedPrompt], Mapping[str, float]]:
        """Score prompts and completions; return the seconds by phase, too.

        Args:
            sequences: ids of prompt and completion, without a mark between the two.
            messages: of each prompt, if the request has them.
            field: name of the sequences in errors.
            adapter: see ``TeacherService.score``, also for ``admit`` and ``key``.

        Raises:
            ServiceError: 400 if a prompt is unknown, or as ``TeacherService.score``.
        """
        ...
