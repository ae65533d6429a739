"""What a teacher is asked to score, and which answers are believed."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.counters import Counters
from mopd_protocol.codec import BINARY_MEDIA_TYPE, encode_binary
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import Message, TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.client.scripted_teacher import TABLE, ScriptedTeacher, manifest, network, problem
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio


def client_of(teacher: ScriptedTeacher, **settings: Any) -> TeacherClient:
    still = StillClock()
    return TeacherClient(
        "math", ["http://math"], transport=network(math=teacher), clock=still.clock, **settings
    )


def asking(*token_ids: int, name: str | None = None) -> SequenceRequest:
    return SequenceRequest(id=name, prompt="?", completion_token_ids=list(token_ids))


def answer(
    token_ids: list[int], topk_ids: list[int] | None = None, **changes: Any
) -> httpx.Response:
    """Scores of one sequence, right or wrong."""
    rows = len(token_ids)
    nats = np.full(rows, -1.0)
    topk = TopKLogprobs(np.array(topk_ids or token_ids)[:, None], nats[:, None], nats, nats)
    completion = TokenSequence(token_ids, np.zeros(rows), b"")
    fields: dict[str, Any] = {
        "manifest_id": manifest().manifest_id,
        "ids": (None,),
        "scores": (TeacherScore("", completion, topk),),
    }
    return httpx.Response(200, content=encode_binary(LogprobsResponse(**{**fields, **changes})))


async def test_scores_come_in_the_order_of_the_sequences():
    async with client_of(ScriptedTeacher()) as client:
        scores = await client.score([asking(70, 71), asking(), asking(72)], top_k=1)

    assert [score.completion.token_ids.tolist() for score in scores] == [[70, 71], [], [72]]
    assert {score.manifest_id for score in scores} == {manifest().manifest_id}


async def test_everything_that_was_asked_is_sent():
    teacher = ScriptedTeacher()
    sequence = SequenceRequest(
        id="a",
        messages=[Message(role="user", content="3 + 4 =")],
        completion=["7", ControlToken(control="<think>")],
        finished=True,
        candidate_ids=[[5, 6], []],
    )
    teacher.script("/v1/logprobs", answer([], ids=("a",)))
    async with client_of(teacher) as client:
        await client.score([sequence], top_k=12, temperature=0.7, logprobs_dtype="float16")

    [asked] = teacher.asked_for("/v1/logprobs")
    assert asked.method == "POST"
    assert asked.headers["accept"] == BINARY_MEDIA_TYPE
    assert asked.headers["content-type"] == "application/json"
    assert asked.body == {
        "sequences": [
            {
                "id": "a",
                "messages": [{"role": "user", "content": "3 + 4 ="}],
                "completion": ["7", {"control": "<think>"}],
                "finished": True,
                "candidate_ids": [[5, 6], []],
            }
        ],
        "top_k": 12,
        "temperature": 0.7,
        "logprobs_dtype": "float16",
    }


async def test_what_is_not_chosen_is_sent_as_its_default():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.score([asking(70)], top_k=3)

    [asked] = teacher.asked_for("/v1/logprobs")
    assert (asked.body["temperature"], asked.body["logprobs_dtype"]) == (1.0, "float32")
    assert asked.body["top_k"] == 3


async def test_no_sequences_are_answered_without_asking():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        assert await client.score([], top_k=1) == []

    assert teacher.asked == []


async def test_the_first_scores_shake_hands_once():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await asyncio.gather(*[client.score([asking(70)], top_k=1) for _ in range(5)])

    assert len(teacher.asked_for("/v1/manifest")) == 1


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 1, "temperature": 0.0}])
async def test_a_request_that_cannot_be_answered_is_the_callers(settings):
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        with pytest.raises(ConfigError, match="a request that no teacher can answer"):
            await client.score([asking(70)], **settings)

    assert teacher.asked == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (answer([70], scores=(), ids=()), "'math' answered 0 scores, expected 1"),
        (answer([70], ids=("b",)), r"answered sequences \['b'\], expected \[None\]"),
        (answer([TABLE.size]), "answered token id 420 in sequence 0, expected ids 0 to 419"),
        (answer([-1], [5]), "answered token id -1 in sequence 0, expected ids 0 to 419"),
        (answer([70], [TABLE.size]), "answered token id 420 in sequence 0, expected ids 0 to 419"),
        (httpx.Response(200, text="<html>"), "teacher 'math' answered nonsense: not a scores body"),
        (httpx.Response(200, content=answer([70]).content[:-1]), "answered nonsense: "),
    ],
)
async def test_an_answer_that_cannot_be_right_is_refused_and_not_tried_again(wrong, message):
    teacher = ScriptedTeacher()
    teacher.script("/v1/logprobs", wrong)
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError, match=message):
            await client.score([asking(70)], top_k=1)

    assert len(teacher.asked_for("/v1/logprobs")) == 1
    assert client.counters.failures == 1


async def test_the_highest_id_and_an_absent_entry_are_believed():
    teacher = ScriptedTeacher()
    last = TABLE.size - 1
    teacher.script("/v1/logprobs", answer([last], [last]))
    async with client_of(teacher) as client:
        [score] = await client.score([asking(last)], top_k=1)

    assert score.topk.ids.tolist() == [[last]]


async def test_a_teacher_that_changes_in_mid_run_is_refused():
    teacher = ScriptedTeacher()
    async with client_of(teacher) as client:
        await client.score([asking(70)], top_k=1)
        teacher.manifest = manifest(revision="r2")
        with pytest.raises(DataError) as told:
            await client.score([asking(70)], top_k=1)

    assert f"its manifest is {teacher.manifest.manifest_id[:12]}, expected" in str(told.value)
    assert "as at the handshake; serve the same again, or begin another run" in str(told.value)


async def test_a_refusal_tells_teacher_status_and_detail():
    teacher = ScriptedTeacher()
    detail = "the prompt and completion are 600 tokens, the limit is 512"
    teacher.script("/v1/logprobs", problem(413, detail))
    async with client_of(teacher) as client:
        with pytest.raises(TeacherError) as told:
            await client.score([asking(70)], top_k=1)

    assert str(told.value) == f"teacher 'math' answered 413: {detail}"


async def test_concurrency_is_bounded():
    teacher = ScriptedTeacher()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(teacher, max_concurrency=3) as client:
        await client.handshake()
        calls = [asyncio.create_task(client.score([asking(70)], top_k=1)) for _ in range(10)]
        await _settle()
        assert teacher.in_flight == 3
        gate.set()
        await asyncio.gather(*calls)

    assert teacher.most_in_flight == 3
    assert len(teacher.asked_for("/v1/logprobs")) == 10


async def test_calls_spread_over_replicas_by_what_is_in_flight():
    teachers = {host: ScriptedTeacher() for host in ("a", "b", "c")}
    gate = asyncio.Event()
    for teacher in teachers.values():
        teacher.pause = gate.wait
    client = TeacherClient(
        "math", [f"http://{host}" for host in teachers], transport=network(**teachers)
    )
    async with client:
        await client.handshake()
        calls = [asyncio.create_task(client.score([asking(70)], top_k=1)) for _ in range(7)]
        await _settle()
        assert sorted(teacher.in_flight for teacher in teachers.values()) == [2, 2, 3]
        gate.set()
        await asyncio.gather(*calls)

    assert [replica.in_flight for replica in client.replicas] == [0, 0, 0]


async def test_a_cancelled_call_leaves_its_turn_and_its_replica():
    teacher = ScriptedTeacher()
    gate = asyncio.Event()
    teacher.pause = gate.wait
    async with client_of(teacher, max_concurrency=1) as client:
        await client.handshake()
        call = asyncio.create_task(client.score([asking(70)], top_k=1))
        await _settle()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.replicas[0].in_flight == 0
        gate.set()
        assert len(await client.score([asking(70)], top_k=1)) == 1


async def test_counters_tell_what_scoring_cost():
    teacher = ScriptedTeacher()
    teacher.script("/v1/logprobs", problem(503, "loading"), problem(503, "loading"))
    async with client_of(teacher) as client:
        await client.score([asking(70, 71), asking(72)], top_k=1)
        teacher.script("/v1/logprobs", problem(413, "too long"))
        with pytest.raises(TeacherError):
            await client.score([asking(70)], top_k=1)

    taken = client.counters.take()
    assert taken.received_bytes > 3 * 8  # of each token an id and a logprob, and their frame
    assert replace(taken, received_bytes=0) == Counters(
        requests=2, retries=2, failures=1, tokens_scored=3, seconds=[0.75]
    )
    assert client.counters == Counters()
    client.counters.seconds.append(1.0)
    assert taken.seconds == [0.75]


async def _settle() -> None:
    """Lets every task run until all of them wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)
