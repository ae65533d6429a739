"""The fakes of these tests do what the tests take them to do."""

import httpx
import pytest

from mopd_protocol.codec import decode_binary
from mopd_protocol.manifest import Manifest
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

REQUEST = {"sequences": [{"id": "a", "prompt": "?", "completion_token_ids": [70, 0]}], "top_k": 1}


async def test_a_scripted_teacher_answers_by_the_contract():
    teacher = ScriptedTeacher()
    async with httpx.AsyncClient(transport=network(math=teacher), base_url="http://math") as http:
        answered = Manifest.parse((await http.get("/v1/manifest")).json())
        response = decode_binary((await http.post("/v1/logprobs", json=REQUEST)).content)

    assert answered == manifest()
    assert response.manifest_id == manifest().manifest_id
    assert response.ids == ("a",)
    assert response.scores[0].completion.token_ids.tolist() == [70, 0]
    assert response.scores[0].completion.ends_turn


async def test_a_scripted_teacher_records_what_it_is_asked():
    teacher = ScriptedTeacher()
    async with httpx.AsyncClient(transport=network(math=teacher), base_url="http://math") as http:
        await http.post("/v1/logprobs", json=REQUEST, headers={"x-mark": "1"})
        await http.get("/readyz")

    assert [(asked.method, asked.path) for asked in teacher.asked] == [
        ("POST", "/v1/logprobs"),
        ("GET", "/readyz"),
    ]
    assert teacher.asked[0].body == REQUEST
    assert teacher.asked[0].headers["x-mark"] == "1"
    assert teacher.asked_for("/readyz") == teacher.asked[1:]
    assert (teacher.in_flight, teacher.most_in_flight) == (0, 1)


async def test_a_scripted_teacher_fails_as_told_and_then_no_more():
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


async def test_an_unknown_host_does_not_answer():
    async with httpx.AsyncClient(transport=network()) as http:
        with pytest.raises(httpx.ConnectError, match="no host code"):
            await http.get("http://code/readyz")


async def test_a_still_clock_moves_only_in_sleep():
    still = StillClock(chance=0.5)
    await still.clock.sleep(2.0)

    assert still.clock.now() == 2.0
    assert still.sleeps == [2.0]
    assert still.clock.chance() == 0.5
