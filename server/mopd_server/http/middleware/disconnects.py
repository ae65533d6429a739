"""Stops work for a client that has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from mopd_server.http.problems import CLIENT_CLOSED_REQUEST
from mopd_server.service_error import ServiceError

Answer = TypeVar("Answer")


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, Answer], ending: asyncio.Future[None]
) -> Answer:
    """The result of ``work``, which is cancelled when the client closes its connection first.

    The request's body must have been read. ``ending`` raises when the whole service stops.

    Raises:
        ServiceError: 499, which nobody will read, but which is counted; or that of ``ending``.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait({working, watching, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if ending.done():
            ending.result()
        raise ServiceError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
    finally:
        working.cancel()
        watching.cancel()


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
