"""The fakes behave as the tests assume."""

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from mopd_protocol.codec import decode_binary
from mopd_protocol.manifest import Manifest
from tests.client.scripted_teacher import (
    TABLE,
    TOKENIZER_JSON,
    ScriptedTeacher,
    manifest,
    network,
    problem,
)
from tests.client.scripted_vllm import ScriptedVllm
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

REQUEST = {"sequences": [{"id": "a", "prompt": "?", "completion_token_ids": [70, 0]}], "top_k": 1}


async def test_a_scripted_teacher_follows_the_contract():
    teacher = ScriptedTeacher()
    async with httpx.AsyncClient(transport=network(math=teacher), base_url="http://math") as http:
        received = Manifest.parse((await http.get("/v1/manifest")).json())
        response = decode_binary((await http.post("/v1/logprobs", json=REQUEST)).content)

    assert received == manifest()
    assert response.manifest_id == manifest().manifest_id
    assert response.ids == ("a",)
    assert response.scores[0].completion.token_ids.tolist() == [70, 0]
    assert response.scores[0].completion.ends_turn


async def test_a_scripted_teacher_records_its_requests():
    teacher = ScriptedTeacher()
    async with httpx.AsyncClient(transport=network(math=teacher), base_url="http://math") as http:
        await http.post("/v1/logprobs", json=REQUEST, headers={"x-mark": "1"})
        await http.get("/readyz")

    assert [(request.method, request.path) for request in teacher.requests] == [
        ("POST", "/v1/logprobs"),
        ("GET", "/readyz"),
    ]
    assert teacher.requests[0].body == REQUEST
    assert teacher.requests[0].headers["x-mark"] == "1"
    assert teacher.requests_to("/readyz") == teacher.requests[1:]
    assert (teacher.in_flight, teacher.most_in_flight) == (0, 1)


async def test_a_scripted_teacher_fails_as_scripted_and_then_recovers():
    teacher = ScriptedTeacher()
    teacher.script(
        "/readyz", httpx.ReadError("cut"), problem(503, "loading", **{"retry-after": "2"})
    )
    async with httpx.AsyncClient(transport=network(math=teacher), base_url="http://math") as http:
        with pytest.raises(httpx.ReadError, match="cut"):
            await http.get("/readyz")
        second, third = await http.get("/readyz"), await http.get("/readyz")

    assert (second.status_code, second.headers["retry-after"]) == (503, "2")
    assert second.json()["detail"] == "loading"
    assert third.status_code == 200


async def test_an_unknown_host_is_unreachable():
    async with httpx.AsyncClient(transport=network()) as http:
        with pytest.raises(httpx.ConnectError, match="no host code"):
            await http.get("http://code/readyz")


async def test_a_still_clock_moves_only_in_sleep():
    still = StillClock(random=0.5)
    await still.clock.sleep(2.0)

    assert still.clock.now() == 2.0
    assert still.pauses == [2.0]
    assert still.clock.random() == 0.5


def scripted_vllm() -> ScriptedVllm:
    tokenizer = Tokenizer.from_str(TOKENIZER_JSON)
    return ScriptedVllm(tokenizer, width=TABLE.size)


async def test_a_scripted_vllm_returns_distributions_in_the_recorded_form():
    server = scripted_vllm()
    body = {"model": "org/served", "prompt": [70, 71, 72], "prompt_logprobs": 2, "max_tokens": 1}
    async with httpx.AsyncClient(transport=server.transport, base_url="http://vllm") as http:
        response = (await http.post("/v1/completions", json=body)).json()

    assert np.exp(server.row([70, 71])).sum() == pytest.approx(1)
    [choice] = response["choices"]
    nothing, _, last = choice["prompt_logprobs"]
    assert nothing is None
    assert next(iter(last)) == "72"  # the prompt's own token comes first
    ranked = np.argsort(-server.row([70, 71])).tolist()
    assert {int(token) for token in last} == {72, *ranked[:2]}
    for token, entry in last.items():
        assert entry["logprob"] == np.float32(server.row([70, 71])[int(token)])
        assert entry["rank"] == ranked.index(int(token)) + 1
    assert server.requests_to("/v1/completions") == [body]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"prompt": [70] * 255}, 200),
        ({"prompt": [70] * 256}, 400),
        ({"prompt_logprobs": 21}, 400),
        ({"model": "other"}, 404),
    ],
)
async def test_a_scripted_vllm_rejects_the_same_requests_as_the_server(changes, status):
    body = {"model": "org/served", "prompt": [70], "prompt_logprobs": 20, "max_tokens": 1}
    async with httpx.AsyncClient(
        transport=scripted_vllm().transport, base_url="http://vllm"
    ) as http:
        response = await http.post("/v1/completions", json={**body, **changes})

    assert response.status_code == status
    assert ("error" in response.json()) == (status != 200)
