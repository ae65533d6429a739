"""The same client without ``await``, also where an event loop already runs."""

import pytest

from mopd_client.services.expectation import Expectation
from mopd_client.sync import SyncTeacherClient
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import TABLE, ScriptedTeacher, manifest, network

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])


def sync_client(teacher: ScriptedTeacher) -> SyncTeacherClient:
    return SyncTeacherClient(
        TeacherClient("math", ["http://math"], transport=network(math=teacher))
    )


def test_a_notebook_asks_without_await():
    teacher = ScriptedTeacher()
    with sync_client(teacher) as client:
        client.wait_until_ready(600.0)
        assert client.handshake() == manifest()
        assert client.tokenizer().table.fingerprint == TABLE.fingerprint
        [score] = client.score([SEQUENCE], top_k=2, temperature=0.5, logprobs_dtype="float16")

    assert score.completion.token_ids.tolist() == [70]
    [asked] = teacher.asked_for("/v1/logprobs")
    assert asked.body["top_k"] == 2
    assert asked.body["temperature"] == 0.5
    assert asked.body["logprobs_dtype"] == "float16"


@pytest.mark.anyio
async def test_a_notebook_whose_thread_runs_a_loop_asks_all_the_same():
    with sync_client(ScriptedTeacher()) as client:
        assert client.handshake() == manifest()


def test_refusals_arrive_as_they_are():
    with (
        sync_client(ScriptedTeacher()) as client,
        pytest.raises(ConfigError, match="serves a top_k of at most 64"),
    ):
        client.handshake(Expectation(top_k=65))


def test_closing_twice_does_nothing():
    client = sync_client(ScriptedTeacher())
    client.close()
    client.close()
