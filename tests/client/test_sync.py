"""The synchronous client, also inside a running event loop."""

import gc
import threading

import pytest

from mopd_client import Expectation, SyncTeacherClient
from mopd_protocol import ConfigError
from mopd_protocol.requests import SequenceRequest
from tests.client.scripted_teacher import TABLE, ScriptedTeacher, manifest, network

SEQUENCE = SequenceRequest(prompt="?", completion_token_ids=[70])


def sync_client(teacher: ScriptedTeacher) -> SyncTeacherClient:
    return SyncTeacherClient("http://math", transport=network(math=teacher), verify=0)


def test_all_methods_work_without_await():
    teacher = ScriptedTeacher()
    with sync_client(teacher) as client:
        client.wait_until_ready(600.0)
        assert client.handshake() == manifest()
        assert client.tokenizer().table.fingerprint == TABLE.fingerprint
        [score] = client.score_batch([SEQUENCE], top_k=2, temperature=0.5, logprobs_dtype="float16")

    assert score.token_ids.tolist() == [70]
    [request] = teacher.requests_to("/v1/logprobs")
    assert request.body["top_k"] == 2
    assert request.body["temperature"] == 0.5
    assert request.body["logprobs_dtype"] == "float16"


def test_one_completion_is_scored_from_keyword_arguments():
    teacher = ScriptedTeacher()
    client = sync_client(teacher)
    messages = [{"role": "user", "content": "3 + 4 ="}]
    client.score(messages=messages, completion="7", finished=True, top_k=3)
    score = client.score(prompt="?", completion_token_ids=[70, 71])

    first, second = [request.body for request in teacher.requests_to("/v1/logprobs")]
    [sent] = first["sequences"]
    assert sent.pop("id")
    assert sent == {"messages": messages, "completion": "7", "finished": True}
    assert (first["top_k"], second["top_k"], second["temperature"]) == (3, 1, 1.0)
    assert score.token_ids.tolist() == [70, 71]
    assert score.logprobs.tolist() == pytest.approx([-0.6931472] * 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"completion": "7"},
        {"prompt": "?"},
        {"prompt": "?", "messages": [{"role": "user", "content": "?"}], "completion": "7"},
        {"messages": [{"content": "?"}], "completion": "7"},
        {"prompt": "?", "completion": "7", "top_k": 0},
    ],
)
def test_invalid_arguments_raise_before_a_request(arguments):
    teacher = ScriptedTeacher()
    with sync_client(teacher) as client, pytest.raises(ConfigError):
        client.score(**arguments)
    assert teacher.requests == []


@pytest.mark.anyio
async def test_it_works_inside_a_running_event_loop():
    with sync_client(ScriptedTeacher()) as client:
        assert client.handshake() == manifest()


def test_errors_keep_their_class():
    with sync_client(ScriptedTeacher()) as client, pytest.raises(ConfigError) as caught:
        client.handshake(Expectation(top_k=65))
    assert caught.value.key == "top_k"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "teacher teacher"]


def test_closing_twice_has_no_effect():
    client = sync_client(ScriptedTeacher())
    assert threads()
    client.close()
    assert not threads()
    client.close()


def test_garbage_collection_closes_the_client():
    client = sync_client(ScriptedTeacher())
    client.handshake()
    [thread] = threads()
    del client
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()
