"""The event loop runs while messages of megabytes are parsed, encoded and sent."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_server import app as application
from mopd_server.http import request_body
from mopd_server.http.parted_response import PART_BYTES, PartedResponse
from tests.server.tiny_teachers import TinyTeacher, get, post_async, request_async

SEQUENCE = {"prompt_token_ids": [1], "completion_token_ids": [2, 3], "id": "x" * 2**16}


@pytest.mark.parametrize(
    ("module", "function", "accept"),
    [
        (request_body, "parse_in_parts", BINARY_MEDIA_TYPE),
        (application, "encode_json", "application/json"),
        (application, "encode_binary_buffer", BINARY_MEDIA_TYPE),
    ],
)
def test_probes_get_responses_while_large_messages_are_converted(
    module: Any,
    function: str,
    accept: str,
    qwen_teacher: TinyTeacher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, convert, probed = qwen_teacher.app, getattr(module, function), threading.Event()

    async def scenario() -> httpx.Response:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def blocked(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            assert probed.wait(timeout=300), "the conversion runs on the event loop"
            return convert(*arguments)

        monkeypatch.setattr(module, function, blocked)
        body = {"sequences": [SEQUENCE], "top_k": 2}
        request = asyncio.create_task(post_async(app, body, {"Accept": accept}))
        await started.wait()
        assert (await request_async(app, "GET", "/healthz")).status_code == 200
        probed.set()
        return await request

    assert asyncio.run(scenario()).status_code == 200


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1])
def test_body_in_parts_is_complete(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    response = get(PartedResponse(body), "/")  # type: ignore[arg-type]
    assert response.content == body
    assert response.headers["content-length"] == str(size)
