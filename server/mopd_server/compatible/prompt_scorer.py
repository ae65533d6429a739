"""``PromptScorer``: distributions at every position of prompts, which the routes encode.

The routes know neither engines nor tokenizers: a scorer may return the distributions of a teacher
with another vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import IntArray
from mopd_protocol.errors import TeacherError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import ScoringTask
from mopd_server.scoring.request_limits import LARGE_TEXT, require_temperature
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError, invalid_field

#: A text, several, the ids of a text, or those of several.
Prompts = str | list[str] | list[int] | list[list[int]]

#: Called with the number of prompt and completion tokens before scoring; may raise ServiceError.
AdmitTokens = Callable[[int, int], None]


@dataclass(frozen=True)
class PromptsToScore:
    """Settings of a request, and the names of its fields for errors."""

    field: str
    prompts: Prompts
    top_k_field: str
    top_k: int  # at least 1
    temperature: float


@dataclass(frozen=True)
class PromptScores:
    """Distributions of prompts of ``n`` tokens, and the seconds by phase."""

    topk: Sequence[TopKLogprobs]  # of each prompt: row r predicts token r + 1, [n - 1, k]
    timings: Mapping[str, float]
    unknown: Sequence[NDArray[np.bool_]] | None = None  # of each prompt: rows that are null
    fields: Sequence[Mapping[str, object]] | None = None  # of each prompt: more fields


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a scorer."""

    width: int  # ids are below
    max_tokens: int  # of one prompt
    max_top_k: int


class PromptScorer(Protocol):
    """Scores the tokens of complete prompts."""

    @property
    def limits(self) -> PromptLimits:
        """Limits of a request."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, begun as the tokenizer begins a text.

        Raises:
            ServiceError: if the text is not valid Unicode, or far too long.
        """
        ...

    async def score(
        self,
        prompts: Sequence[IntArray],
        *,
        top_k: int,
        temperature: float,
        admit: AdmitTokens,
        key: str,
    ) -> PromptScores:
        """Score prompts within ``limits``; ``key`` is the name of the API key.

        Raises:
            ServiceError: if any prompt cannot be scored, or the temperature is not supported.
        """
        ...


class TeacherPromptScorer:
    """The ``PromptScorer`` of a teacher, in its vocabulary."""

    def __init__(self, service: TeacherService, adapter: str | None) -> None:
        self._service = service
        self._adapter = adapter
        self._manifest = service.manifests[adapter]

    @property
    def limits(self) -> PromptLimits:
        """Rows of the head, including those without a token, and the manifest's limits."""
        manifest = self._manifest
        return PromptLimits(manifest.logit_width, manifest.max_model_len, manifest.max_top_k)

    def encode(self, text: str) -> list[int]:
        """See ``PromptScorer.encode``."""
        try:
            sequence = SequenceRequest(prompt=text, completion_token_ids=[])
            return self._service.tokenize(sequence).prompt_ids.tolist()
        except TeacherError as error:
            status = error.status or HTTPStatus.BAD_REQUEST
            raise ServiceError(status, str(error), key=error.key) from error

    async def score(
        self,
        prompts: Sequence[IntArray],
        *,
        top_k: int,
        temperature: float,
        admit: AdmitTokens,
        key: str,
    ) -> PromptScores:
        """See ``PromptScorer.score``: the first token is the prompt of a completion."""
        require_temperature(temperature, self._manifest)
        tasks = [ScoringTask(ids[:1], ids[1:], adapter=self._adapter) for ids in prompts]
        return PromptScores(
            *await self._service.score_tasks(
                tasks, top_k=top_k, temperature=temperature, admit=admit, key=key
            )
        )


def prompts_of(settings: PromptsToScore, scorer: PromptScorer) -> list[IntArray]:
    """Return the ids of every prompt of a request, each ``[at least 1]``.

    Raises:
        ServiceError: 400 for too many entries, no prompts, an empty one or an id outside the
            vocabulary; 413 for a prompt that is too long.
    """
    limits, field, prompts = scorer.limits, settings.field, settings.prompts
    if settings.top_k > limits.max_top_k:
        raise invalid_field(
            settings.top_k_field,
            f"found {settings.top_k}, expected at most {limits.max_top_k} (max_top_k in the "
            "manifest of this teacher)",
        )
    if isinstance(prompts, str):
        return [_require_valid(field, scorer.encode(prompts), limits)]
    texts = [each for each in prompts if isinstance(each, str)]
    lists = [each for each in prompts if isinstance(each, list)]
    if not is_batch(prompts) or not prompts:
        ids = [each for each in prompts if isinstance(each, int)]
        return [_require_valid(field, ids, limits)]
    return [
        _require_valid(f"{field}[{index}]", ids, limits)
        for index, ids in enumerate(lists or map(scorer.encode, texts))
    ]


def is_batch(prompts: Prompts) -> bool:
    """Return whether a request has a list of prompts, else only one."""
    return not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))


def is_large(prompts: Prompts) -> bool:
    """Return whether converting the prompts takes long enough to delay other requests."""
    inner = [len(each) for each in prompts if isinstance(each, (str, list))]
    return len(prompts) + sum(inner) > LARGE_TEXT


def _require_valid(field: str, ids: list[int], limits: PromptLimits) -> IntArray:
    if not ids:
        raise invalid_field(field, "found no tokens, expected at least one")
    if len(ids) > limits.max_tokens:
        raise invalid_field(
            field,
            f"the sequence is too long (found {len(ids)} tokens, expected at most "
            f"{limits.max_tokens}: max_model_len in the manifest of this teacher)",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
    if (highest := max(ids)) >= limits.width:  # checked first: such an id may overflow an array
        raise invalid_field(
            field,
            f"id outside this teacher's vocabulary (found {highest}, expected less than "
            f"{limits.width})",
        )
    return np.array(ids, dtype=np.int32)
