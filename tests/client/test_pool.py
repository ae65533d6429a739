"""Each sample goes to its own teacher."""

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
            name: TeacherClient(name, [f"http://{name}"], transport=transport, clock=clock)
            for name in teachers
        }
    )


async def test_a_sample_is_scored_by_the_teacher_that_it_names():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(model="org/code"))
    async with pool_of(math=math, code=code) as pool:
        [score] = await pool.score(
            "code", [SEQUENCE], top_k=2, temperature=0.5, logprobs_dtype="float16"
        )

    assert score.manifest_id == code.manifest.manifest_id
    [asked] = code.asked_for("/v1/logprobs")
    assert asked.body["top_k"] == 2
    assert asked.body["temperature"] == 0.5
    assert asked.body["logprobs_dtype"] == "float16"
    assert math.asked == []


async def test_an_unknown_teacher_is_refused_with_the_known_ones():
    async with pool_of(math=ScriptedTeacher(), code=ScriptedTeacher()) as pool:
        for refused in (
            pool.score("maths", [SEQUENCE], top_k=1),
            pool.handshake_all({"maths": Expectation()}),
        ):
            with pytest.raises(
                ConfigError, match="unknown teacher 'maths'; known teachers are code, math"
            ):
                await refused


async def test_all_hands_are_shaken_each_with_its_own_expectation():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(model="org/code", max_top_k=4))
    async with pool_of(math=math, code=code) as pool:
        manifests = await pool.handshake_all({"math": Expectation(top_k=64)})
        assert manifests == {"math": math.manifest, "code": code.manifest}
        with pytest.raises(ConfigError, match="teacher 'code' serves a top_k of at most 4"):
            await pool.handshake_all({"code": Expectation(top_k=64)})


async def test_several_refusals_are_told_together():
    math, code = ScriptedTeacher(), ScriptedTeacher(manifest(max_top_k=4))
    math.script("/v1/manifest", problem(401, "no key"))
    async with pool_of(math=math, code=code) as pool:
        with pytest.raises(TeacherError) as told:
            await pool.handshake_all({"code": Expectation(top_k=64)})

    sentence, *refusals = str(told.value).splitlines()
    assert sentence == "2 teachers cannot be used:"
    assert refusals[0].startswith("  teacher 'math' answered 401: no key")
    assert refusals[1].startswith("  teacher 'code' serves a top_k of at most 4")
    assert len(refusals) == 2


async def test_waiting_waits_for_every_teacher():
    math, code = ScriptedTeacher(), ScriptedTeacher()
    code.script("/readyz", problem(503, "loading"))
    async with pool_of(math=math, code=code) as pool:
        await pool.wait_until_ready(10.0)

    assert (len(math.asked_for("/readyz")), len(code.asked_for("/readyz"))) == (1, 2)


async def test_closing_the_pool_closes_its_teachers():
    async with pool_of(math=ScriptedTeacher()) as pool:
        client = pool.client("math")

    with pytest.raises(RuntimeError, match="closed"):
        await client.handshake()


async def test_a_pool_without_teachers_waits_for_nobody():
    async with TeacherPool({}) as pool:
        await pool.wait_until_ready(0.01)
        assert await pool.handshake_all() == {}
