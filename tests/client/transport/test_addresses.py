"""Every error of a client names the address of its teacher, of several replicas the failing one."""

import json
from typing import Any

import httpx
import pytest

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import MopdError
from mopd_protocol.manifest import MANIFEST_HEADER
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

ADDRESS = "http://math:8101"
SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])
HTML = httpx.Response(200, html="<html>proxy</html>")
OWN = {MANIFEST_HEADER: manifest().manifest_id}


def client_of(teacher: ScriptedTeacher, *urls: str) -> TeacherClient:
    hosts = {httpx.URL(url).host: teacher for url in urls}
    clock = StillClock().clock
    return TeacherClient("math", urls, transport=network(**hosts), clock=clock, deadline_seconds=5)


async def use(client: TeacherClient) -> None:
    await client.wait_until_ready(5.0)
    await client.tokenizer()
    await client.score([SEQUENCE], top_k=1)


FAILURES: dict[str, tuple[str, Any]] = {
    "no connection": ("/v1/logprobs", httpx.ConnectError("connection refused")),
    "late": ("/v1/logprobs", TimeoutError()),
    "busy": ("/v1/logprobs", problem(503, "the queue is full")),
    "rejected": ("/v1/logprobs", problem(400, "top_k: too large", **OWN)),
    "unauthorized": ("/v1/logprobs", problem(401, "no key")),
    "another server": ("/v1/logprobs", HTML),
    "another type": ("/v1/logprobs", httpx.Response(200, html="", headers=OWN)),
    "another teacher": (
        "/v1/logprobs",
        httpx.Response(200, headers={MANIFEST_HEADER: "0" * 32}),
    ),
    "no manifest": ("/v1/manifest", HTML),
    "another version": ("/v1/manifest", httpx.Response(200, json={"schema_version": 99})),
    "no tokenizer": ("/v1/tokenizer", httpx.Response(200, json={})),
    "invalid tokenizer": (
        "/v1/tokenizer",
        httpx.Response(200, json={"files": {"tokenizer.json": "{}"}}),
    ),
    "not ready": ("/readyz", problem(404, "no such route")),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_error_names_the_address(failure: str) -> None:
    path, response = FAILURES[failure]
    teacher = ScriptedTeacher()
    teacher.script(path, *[response] * 20)
    async with client_of(teacher, ADDRESS) as client:
        with pytest.raises(MopdError) as caught:
            await use(client)
    assert str(caught.value).startswith(f"teacher 'math' at {ADDRESS}")
    assert str(caught.value).count(ADDRESS) == 1


@pytest.mark.parametrize("field", ["ids", "token_ids"])
async def test_an_error_about_a_response_names_the_address(field: str) -> None:
    teacher = ScriptedTeacher()
    async with client_of(teacher, ADDRESS) as client:
        document = {"manifest_id": "0" * 32, "sequences": [{"id": field}]}
        content = json.dumps(document).encode()
        headers = {**OWN, "content-type": "application/json"}
        teacher.script("/v1/logprobs", httpx.Response(200, content=content, headers=headers))
        with pytest.raises(MopdError, match=ADDRESS):
            await client.score([SEQUENCE], top_k=1)
        with pytest.raises(MopdError, match=ADDRESS) as caught:
            await client.handshake(Expectation(top_k=1000))
    assert caught.value.key == "top_k"


async def test_of_several_replicas_the_failing_one_is_named() -> None:
    other = "http://other:8101"
    teacher, second = ScriptedTeacher(), ScriptedTeacher()
    failures = [httpx.ConnectError("connection refused")] * 20
    second.script("/v1/manifest", *failures)
    clock = StillClock().clock
    transport = network(math=teacher, other=second)
    async with TeacherClient(
        "math",
        [ADDRESS, other],
        require_all_replicas=True,
        transport=transport,
        clock=clock,
        deadline_seconds=5,
    ) as client:
        with pytest.raises(MopdError) as caught:
            await client.handshake()
    assert other in str(caught.value)
    assert ADDRESS not in str(caught.value)
