"""Cancellation of work for disconnected clients."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from mopd_server.service_error import CLIENT_CLOSED_REQUEST, ServiceError

Result = TypeVar("Result")


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, Result], abort: asyncio.Future[None]
) -> Result:
    """Return the result of ``work``; cancel ``work`` if the client disconnects.

    The request's body must be complete. ``abort`` raises when the service stops.

    Raises:
        ServiceError: 499, for metrics and log; or the error of ``abort``.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, watching, abort}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if abort.done():
            abort.result()
        raise ServiceError(CLIENT_CLOSED_REQUEST, "the client disconnected")
    finally:
        working.cancel()
        watching.cancel()
        # Before the request ends, its sequences leave the queue, and its quota is refunded.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
