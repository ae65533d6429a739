"""``EvaluatedModel``: what an evaluation needs of a model; the student behind this interface."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mopd_protocol.samples import Prompt
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.source import CompletionGenerator
from mopd_trainer.student.student import Student

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """A generated completion."""

    text: str  # invalid UTF-8 is replaced by U+FFFD; control tokens have no text
    tokens: int  # with the ending token
    finished: bool  # ended with an ending token


class EvaluatedModel(Protocol):
    """A student or a teacher."""

    async def complete(
        self, prompts: Sequence[Prompt], settings: RolloutConfig, *, seed: int
    ) -> list[Completion]:
        """Return one completion per prompt; an empty one without room for a completion.

        Args:
            settings: temperature (0: greedy), ``top_p``, ``max_new_tokens``.
        """
        ...

    async def log_likelihood(self, prompt: Prompt, text: str) -> float:
        """Return the log-probability, in nats, of a text as the beginning of a completion."""
        ...


def completion_of(table: TokenTable, token_ids: Sequence[int]) -> Completion:
    """Return a completion's text and whether it ended."""
    sequence = table.sequence(token_ids)
    text = sequence.text.decode("utf-8", "replace")
    return Completion(text, len(sequence), sequence.ends_turn)


class StudentModel:
    """The student with the weights that its rollout engine has: an ``EvaluatedModel``.

    Log-likelihoods are computed with the trained weights, on rank 0.
    """

    def __init__(self, student: Student, generator: CompletionGenerator) -> None:
        self._student = student
        self._generator = generator

    async def push_weights(self, version: int) -> None:
        """Load the weights after ``version`` steps into the rollout engine."""
        await self._generator.push_weights(version)

    async def complete(
        self, prompts: Sequence[Prompt], settings: RolloutConfig, *, seed: int
    ) -> list[Completion]:
        """See ``EvaluatedModel``."""
        encoded = [
            self._student.prompt_token_ids(prompt.messages, prompt.tools) for prompt in prompts
        ]
        limit = self._student.max_length
        fits = [limit is None or len(ids) + settings.max_new_tokens <= limit for ids in encoded]
        if not all(fits):
            logger.warning(
                "evaluation: %d of %d prompts have no room for a completion and count as wrong",
                len(fits) - sum(fits),
                len(fits),
            )
        generations = iter(
            await self._generator.generate(
                [ids for ids, fit in zip(encoded, fits, strict=True) if fit], settings, seed=seed
            )
        )
        table = self._student.table
        return [completion_of(table, next(generations).token_ids if fit else ()) for fit in fits]

    async def log_likelihood(self, prompt: Prompt, text: str) -> float:
        """See ``EvaluatedModel``."""
        identity = self._student.identity
        prompt_ids = identity.prompt_token_ids(prompt.messages, prompt.tools)
        text_ids = identity.encoder.encode(text)
        logprobs = await asyncio.to_thread(self._student.logprobs, prompt_ids, text_ids)
        return float(logprobs.sum())
