"""``TeacherModel``: a teacher as an ``EvaluatedModel``, through its scoring requests only.

A teacher service scores completions and generates none. The row of an arbitrary token after a
prefix is the distribution that follows the prefix; one token is generated per request. A completion
of n tokens therefore costs the scoring of n prefixes.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_client.pool import ScoringClient
from mopd_protocol.requests import ChatTemplateKwargs, SequenceRequest
from mopd_protocol.samples import Prompt, TeacherScore, messages_for
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.evaluation.models import Completion, completion_of

#: Sequences of one request.
_BATCH = 32
#: Candidates of a sampled token; the rest of the distribution is ignored.
_CANDIDATES = 64


class TeacherModel:
    """Completions of a teacher: greedy ones exactly, sampled ones from its top 64.

    Args:
        table: of the teacher's tokenizer.
        max_top_k: of the teacher's manifest.
        name: of the teacher in the run, whose messages are sent; default: the student's.
    """

    def __init__(
        self,
        client: ScoringClient,
        table: TokenTable,
        *,
        max_top_k: int,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
        name: str = "",
    ) -> None:
        self._client = client
        self._name = name
        self._table = table
        self._variables = chat_template_kwargs or None
        self._top_k = min(_CANDIDATES, max_top_k)
        controls = {*table.controls.values()}
        present = np.flatnonzero(table.present).tolist()
        self._any_id = next(token_id for token_id in present if token_id not in controls)

    async def complete(
        self, prompts: Sequence[Prompt], settings: RolloutConfig, *, seed: int
    ) -> list[Completion]:
        """See ``EvaluatedModel``.

        Raises:
            TeacherError: if the teacher is unavailable or rejects a prompt.
        """
        token_ids = await self._token_ids(prompts, settings, seed=seed)
        return [completion_of(self._table, ids) for ids in token_ids]

    async def greedy_token_ids(
        self, prompts: Sequence[Prompt], max_new_tokens: int
    ) -> list[list[int]]:
        """Return the token ids of greedy completions, with the ending token.

        Raises:
            TeacherError: if the teacher is unavailable or rejects a prompt.
        """
        settings = RolloutConfig(temperature=0.0, max_new_tokens=max_new_tokens)
        return await self._token_ids(prompts, settings, seed=0)

    async def _token_ids(
        self, prompts: Sequence[Prompt], settings: RolloutConfig, *, seed: int
    ) -> list[list[int]]:
        token_ids: list[list[int]] = [[] for _ in prompts]
        # One generator per completion: the draws do not depend on the other completions.
        generators = [np.random.default_rng([seed, index]) for index in range(len(prompts))]
        active = list(range(len(prompts)))
        for _ in range(settings.max_new_tokens):
            rows = await self._next_rows([(prompts[at], token_ids[at]) for at in active], settings)
            for at, (ids, logprobs) in zip(active, rows, strict=True):
                token_ids[at].append(_choose(ids, logprobs, settings, generators[at]))
            ending = self._table.roles.ending
            active = [at for at in active if token_ids[at][-1] not in ending]
            if not active:
                break
        return token_ids

    async def log_likelihood(self, prompt: Prompt, text: str) -> float:
        """See ``EvaluatedModel``.

        Raises:
            TeacherError: if the teacher is unavailable or rejects the text.
        """
        sequence = SequenceRequest(
            messages=list(messages_for(prompt, self._name)),
            tools=list(prompt.tools),
            chat_template_kwargs=self._variables,
            completion=text,
        )
        (score,) = await self._client.score([sequence], top_k=1)
        return float(score.logprobs.sum())

    async def _next_rows(
        self, prefixes: Sequence[tuple[Prompt, list[int]]], settings: RolloutConfig
    ) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Return the ids [k] and logprobs [k] of the token after each prefix."""
        sequences = [
            SequenceRequest(
                messages=list(messages_for(prompt, self._name)),
                tools=list(prompt.tools),
                chat_template_kwargs=self._variables,
                completion_token_ids=[*ids, self._any_id],
            )
            for prompt, ids in prefixes
        ]
        batches = [sequences[at : at + _BATCH] for at in range(0, len(sequences), _BATCH)]
        top_k = self._top_k if settings.temperature > 0 else 1
        scores: list[list[TeacherScore]] = await asyncio.gather(
            *[self._client.score(batch, top_k=top_k) for batch in batches]
        )
        topks = [score.topk for batch in scores for score in batch]
        return [(topk.ids[-1], topk.logprobs[-1]) for topk in topks]


def _choose(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    settings: RolloutConfig,
    generator: np.random.Generator,
) -> int:
    """Return the most likely id, or one drawn from the candidates, most likely first."""
    if settings.temperature == 0:
        return int(ids[0])
    weights = np.exp((logprobs.astype(np.float64) - float(logprobs[0])) / settings.temperature)
    shares = weights / weights.sum()
    before = np.cumsum(shares) - shares
    shares = np.where(before < settings.top_p, shares, 0.0)
    return int(generator.choice(ids, p=shares / shares.sum()))
