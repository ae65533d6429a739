"""A pool forwards calls to teachers by name."""

import pytest

from mopd_client.pool import TeacherPool
from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError, TeacherError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])


def pool_of(**teachers: ScriptedTeacher) -> TeacherPool:
    transport, clock = network(**teachers), StillClock().clock
    return TeacherPool(
        {
            name: TeacherClient(
                name, [f"http://{name}"], transport=transport, clock=clock, verify=0
            )
            for name in teachers
        }
    )


async def test_the_named_teacher_scores():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(model="org/code"))
    async with pool_of(math=math, code=code) as pool:
        [score] = await pool.score(
            "code", [SEQUENCE], top_k=2, temperature=0.5, logprobs_dtype="float16"
        )

    assert score.manifest_id == code.manifest.manifest_id
    [request] = code.requests_to("/v1/logprobs")
    assert request.body["top_k"] == 2
    assert request.body["temperature"] == 0.5
    assert request.body["logprobs_dtype"] == "float16"
    assert math.requests == []


async def test_an_unknown_name_raises_with_the_known_names():
    async with pool_of(math=ScriptedTeacher(), code=ScriptedTeacher()) as pool:
        for call in (
            pool.score("maths", [SEQUENCE], top_k=1),
            pool.handshake_all({"maths": Expectation()}),
        ):
            with pytest.raises(ConfigError, match=r"'maths' .* code, math") as caught:
                await call
            assert caught.value.key == "teacher"


async def test_each_handshake_has_its_own_expectation():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(model="org/code", max_top_k=4))
    async with pool_of(math=math, code=code) as pool:
        manifests = await pool.handshake_all({"math": Expectation(top_k=64)})
        assert manifests == {"math": math.manifest, "code": code.manifest}
        with pytest.raises(ConfigError, match="teacher 'code'") as caught:
            await pool.handshake_all({"code": Expectation(top_k=64)})
    assert caught.value.key == "top_k"


async def test_several_failures_are_reported_together():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(max_top_k=4))
    math.script("/v1/manifest", problem(401, "no key"))
    async with pool_of(math=math, code=code) as pool:
        with pytest.raises(TeacherError) as caught:
            await pool.handshake_all({"code": Expectation(top_k=64)})

    first_line, *messages = str(caught.value).splitlines()
    assert first_line.startswith("2 teachers")
    assert [name in message for name, message in zip(("'math'", "'code'"), messages, strict=True)]
    assert "401: no key" in messages[0]


async def test_wait_until_ready_waits_for_every_teacher():
    math, code = ScriptedTeacher(), ScriptedTeacher()
    code.script("/readyz", problem(503, "loading"))
    async with pool_of(math=math, code=code) as pool:
        await pool.wait_until_ready(10.0)

    assert (len(math.requests_to("/readyz")), len(code.requests_to("/readyz"))) == (1, 2)


async def test_closing_the_pool_closes_its_teachers():
    async with pool_of(math=ScriptedTeacher()) as pool:
        client = pool.client("math")

    with pytest.raises(RuntimeError, match="closed"):
        await client.handshake()


async def test_an_empty_pool_is_ready():
    async with TeacherPool({}) as pool:
        await pool.wait_until_ready(0.01)
        assert await pool.handshake_all() == {}
