"""``send_bounded``: one HTTP request whose response has a maximum size, decompressed."""

import httpx

from mopd_protocol.errors import InvalidResponseError

#: Twice the largest response of a teacher service (32 Mi entries of 8 bytes).
MAX_RESPONSE_BYTES = 512 * 2**20

#: A chunk of another encoding may expand to any size before it can be counted; gzip is at most
#: 1,032 to 1, in chunks of 64 KiB.
_ENCODINGS = frozenset({"", "identity", "gzip"})

ACCEPT_ENCODING = "gzip"


async def send_bounded(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Return the complete response to ``request``, decompressed.

    Raises:
        InvalidResponseError: above ``MAX_RESPONSE_BYTES``, or compressed by other means than gzip.
        httpx.RequestError: without a response.
    """
    response = await client.send(request, stream=True)
    try:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise _invalid_response(
                response, "content-encoding", f"compressed (found {encoding!r}, expected gzip)"
            )
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > MAX_RESPONSE_BYTES:
                raise _invalid_response(
                    response,
                    "body",
                    f"too large (found over {size} bytes, expected at most {MAX_RESPONSE_BYTES})",
                )
            chunks.append(chunk)
    finally:
        await response.aclose()
    headers = [
        (name, value) for name, value in response.headers.multi_items() if name not in _OF_THE_WIRE
    ]
    return httpx.Response(
        response.status_code, headers=headers, content=b"".join(chunks), request=request
    )


#: Headers that describe the body as it was sent.
_OF_THE_WIRE = frozenset({"content-encoding", "content-length", "transfer-encoding"})


def _invalid_response(response: httpx.Response, key: str, problem: str) -> InvalidResponseError:
    return InvalidResponseError(
        f"{response.request.url}: invalid response: {problem}. Check that no proxy changes "
        "responses, or request fewer sequences at a time.",
        status=response.status_code,
        key=key,
    )
