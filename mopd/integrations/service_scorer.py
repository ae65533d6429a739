"""``ServiceScorer``: a teacher's distributions for sequences of the student's ids.

The route is ``POST /v1/completions`` with ``prompt_logprobs``, which a teacher of the student's
vocabulary, a translating service and a stock vLLM server share.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mopd_client.services.vllm_logprobs import topk_of_prompt_logprobs
from mopd_client.transport.balance import work_of
from mopd_client.transport.clock import Clock
from mopd_client.transport.concurrency import gather_or_cancel
from mopd_client.transport.connection import Connection
from mopd_protocol.errors import DataError, InvalidResponseError
from mopd_protocol.requests import LOSS_HEADER, SequenceRequest
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Environment variable with the API key of the teachers.
KEY_VARIABLE = "MOPD_TEACHER_KEY"


class ServiceScorer:
    """Client of one teacher, for one event loop; retries until the deadline.

    Args:
        url: address of the teacher, or the addresses of its replicas (see ``TeacherClient``).
        loss: value of the header ``Mopd-Loss``, which a translating service checks.
        api_key: sent as a bearer token; by default, the variable ``MOPD_TEACHER_KEY``.

    Raises:
        ConfigError: on an invalid address or key.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        loss: str,
        api_key: str | None = None,
        deadline_seconds: float = 300.0,
    ) -> None:
        self._connection = Connection(
            "teacher",
            [url] if isinstance(url, str) else url,
            api_key=api_key or os.environ.get(KEY_VARIABLE),
            ca_file=None,
            timeout_seconds=deadline_seconds,
            deadline_seconds=deadline_seconds,
            max_concurrency=32,
            transport=None,
            clock=Clock(),
        )
        self._headers = {LOSS_HEADER: loss}
        self._model: str | None = None

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        first: Sequence[int],
        *,
        top_k: int,
        temperature: float = 1.0,
    ) -> list[TopKLogprobs]:
        """Score the tokens of each sequence from position ``first`` (at least 1) on: one row each.

        Args:
            temperature: softmax temperature of the returned distributions.

        Raises:
            TeacherError: if the teacher is unavailable, rejects a request (a translating service
                also by the name of the loss), or returns an invalid response.
        """
        if self._model is None:
            models = await self._connection.get("/v1/models")
            self._model = str(self._json(models)["data"][0]["id"])
        request = {
            "model": self._model,
            "max_tokens": 1,
            "prompt_logprobs": top_k,
            "temperature": temperature,
        }
        return await gather_or_cancel(
            [self._score(request, ids, start) for ids, start in zip(sequences, first, strict=True)]
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    async def _score(self, request: dict[str, Any], ids: Sequence[int], first: int) -> TopKLogprobs:
        body = json.dumps({**request, "prompt": list(ids)}).encode()
        sent = SequenceRequest.model_construct(
            prompt_token_ids=[*ids[:first]], completion_token_ids=[*ids[first:]]
        )
        response = await self._connection.post(
            "/v1/completions", body, self._headers, work=work_of([sent])
        )

        def topk() -> TopKLogprobs:
            [choice] = self._json(response)["choices"]
            entries, top_k = choice["prompt_logprobs"], request["prompt_logprobs"]
            return topk_of_prompt_logprobs(entries, ids, first=first, k=top_k, known=None)

        try:  # in a thread, because the JSON has megabytes and would block other requests
            return await asyncio.to_thread(topk)
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise InvalidResponseError(
                f"teacher at {response.url}: invalid response: {error!r}",
                status=response.status_code,
                key="prompt_logprobs",
            ) from error

    def _json(self, response: Any) -> dict[str, Any]:
        return self._connection.json_object(response, kind="teacher service")


def sampled_logprobs(topk: TopKLogprobs) -> list[list[float]]:
    """[rows, 1], of the completion's tokens in nats; -9999, as from vLLM, if impossible."""
    return np.maximum(topk.token_logprobs, -9999.0)[:, None].tolist()
