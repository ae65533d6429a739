"""A scoring request from its parsed body to its response, within the limits of the service."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from fastapi import Request, Response

from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware.disconnects import cancel_on_disconnect
from mopd_server.http.middleware.quotas import Quotas
from mopd_server.http.middleware.response_limit import ResponseForm
from mopd_server.http.request_record import current_record
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError

#: Entries (id and logprob) above which responses are encoded one at a time: half a MiB in binary.
LARGE_RESPONSE_ENTRIES = 64 * 1024

Result = TypeVar("Result")


class RequestSize(NamedTuple):
    """Size of a tokenized request."""

    sequences: int
    top_k: int
    prompt_tokens: int
    completion_tokens: int
    entries: int
    """Ids and log-probabilities in the response."""


#: Reserves memory and charges the quota of the API key; raises ServiceError if there is none left.
Admit = Callable[[RequestSize], None]


async def respond_within_limits(
    request: Request,
    life: Lifecycle,
    score: Callable[[Admit, str], Awaitable[Result]],
    encode: Callable[[Result], Awaitable[Response]],
    form: ResponseForm,
) -> Response:
    """Score and encode within the timeout, the quota and the memory limit of responses.

    Args:
        score: called with ``Admit``, before the sequences are queued, and the name of the API key;
            cancelled if the client disconnects.
        encode: encodes the result.
        form: of the response.

    Raises:
        ServiceError: of ``score``, the limits or the timeout.
    """
    state = request.app.state
    try:
        with (
            state.response_limit.reservation(form) as reserve,
            life.abort_signal() as abort,
        ):
            async with asyncio.timeout(state.request_timeout_seconds):
                scoring = _score_within_quota(score, state.quotas, reserve)
                result = await cancel_on_disconnect(request, scoring, abort)
            return await encode(result)
    except TimeoutError as error:
        raise ServiceError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"no response within {state.request_timeout_seconds:g} s. Send fewer or shorter "
            "sequences per request.",
        ) from error


async def _score_within_quota(
    score: Callable[[Admit, str], Awaitable[Result]],
    quotas: Quotas,
    reserve: Callable[[int], None],
) -> Result:
    record = current_record()

    def admit(size: RequestSize) -> None:
        reserve(size.entries)
        if record is not None:
            if record.key_name is not None:
                quotas.charge(record.key_name, size.prompt_tokens + size.completion_tokens)
            record.sequences, record.top_k = size.sequences, size.top_k
            record.prompt_tokens = size.prompt_tokens
            record.completion_tokens = size.completion_tokens

    try:
        key = record.key_name if record is not None else None
        return await score(admit, key or "")
    except BaseException:  # a client that disconnects or times out cancels this task
        if record is not None and record.key_name is not None:
            quotas.refund(record.key_name, record.prompt_tokens + record.completion_tokens)
        raise


async def encode_response(
    service: TeacherService,
    encode: Callable[[], Response],
    timings: Mapping[str, float],
    *,
    entries: int,
) -> Response:
    """Encode off the event loop, large responses one at a time; record the seconds by phase."""
    started = time.monotonic()
    encoded = await service.run_in_thread(encode, large=entries > LARGE_RESPONSE_ENTRIES)
    seconds = time.monotonic() - started
    service.metrics.phase_seconds.labels("encode").observe(seconds)
    if record := current_record():
        record.phase_seconds = {**timings, "encode": seconds}
    return encoded
