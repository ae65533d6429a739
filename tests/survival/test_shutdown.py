"""From the first moment to the last: loading, draining, and an engine that crashes."""

import asyncio
import errno
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.requests import SequenceRequest
from tests.ports import free_port
from tests.survival.running_teacher import (
    PATIENCE_SECONDS,
    RunningTeacher,
    running_teacher,
)

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.process

LITTLE = {"sequences": [{"prompt": "the quick", "completion": " fox"}], "top_k": 2}
#: The stand-in responds to it only after its gate opens.
GATED = {**LITTLE, "top_k": 19}
STAND_IN = "tests.survival.unlucky_teacher"


def send(teacher: RunningTeacher, **headers: str) -> httpx.Response:
    """Send a small request."""
    url = f"{teacher.url}/v1/logprobs"
    return httpx.post(url, json=LITTLE, headers=headers, timeout=PATIENCE_SECONDS)


async def post(teacher: RunningTeacher, body: Any) -> httpx.Response:
    """Send a scoring request over a new connection."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        return await client.post(f"{teacher.url}/v1/logprobs", json=body)


async def in_flight(
    teacher: RunningTeacher, body: Any, count: int = 1, already: int = 0
) -> list[Any]:
    """Requests in progress, in addition to the ``already`` running ones."""
    tasks = [asyncio.create_task(post(teacher, body)) for _ in range(count)]
    await asyncio.to_thread(teacher.until_metric, "mopd_requests_in_flight", already + count)
    return tasks


def waiting_at(gate: Path) -> int:
    """Wait until a reader waits at the gate; the descriptor to write to and close to release it."""
    while True:
        try:
            return os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no reader yet
                raise
            threading.Event().wait(0.01)


def test_while_the_model_loads_probes_succeed_and_requests_get_503(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with running_teacher(
        model_folder, tmp_path / "log", ready=False, program=STAND_IN, LOADING_WAITS_FOR=str(gate)
    ) as teacher:
        teacher.until("/healthz", 200)
        assert "mopd_ready 0.0" in teacher.get("/metrics").text
        assert "process_resident_memory_bytes" in teacher.get("/metrics").text
        posted = send(teacher)
        for response in (teacher.get("/readyz"), teacher.get("/v1/manifest"), posted):
            assert response.status_code == 503
            assert "loading its model" in response.json()["detail"]
            assert int(response.headers["retry-after"]) >= 1
            assert "secret-qwen" not in response.text
        gate.write_text("open")
        teacher.until("/readyz", 200)
        assert send(teacher).status_code == 200


def test_sigterm_while_loading_stops_the_process_at_once(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with running_teacher(
        model_folder, tmp_path / "log", ready=False, program=STAND_IN, LOADING_WAITS_FOR=str(gate)
    ) as teacher:
        teacher.until("/healthz", 200)
        assert teacher.stop() == 0
    assert "Traceback" not in teacher.log.read_text()


def test_a_model_that_cannot_be_loaded_ends_the_process_with_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with running_teacher(broken, tmp_path / "log", ready=False) as teacher:
        assert teacher.process.wait(PATIENCE_SECONDS) == 1
    assert teacher.log.read_text().splitlines()[-1].startswith("mopd-teacher: ")


def test_a_drain_finishes_accepted_requests_and_rejects_others(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        accepted = await in_flight(teacher, GATED)
        accepted += await in_flight(teacher, LITTLE, 8, already=1)
        async with httpx.AsyncClient(base_url=teacher.url, timeout=PATIENCE_SECONDS) as client:
            assert (await client.get("/readyz")).status_code == 200
            teacher.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(teacher.until, "/readyz", 503)
            assert (await client.get("/healthz")).status_code == 200
            refused = await client.post("/v1/logprobs", json=LITTLE)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        gate.write_text("open")
        for request in accepted:
            response = await request
            assert response.status_code == 200
            assert len(response.json()["sequences"]) == 1

    options = ("--drain-timeout", str(PATIENCE_SECONDS))
    with running_teacher(
        model_folder, tmp_path / "log", *options, program=STAND_IN, ENGINE_WAITS_FOR=str(gate)
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 0


def test_requests_beyond_the_drain_timeout_get_503(model_folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        (accepted,) = await in_flight(teacher, GATED)
        teacher.process.send_signal(signal.SIGTERM)
        response = await accepted
        assert response.status_code == 503
        assert "has shut down" in response.json()["detail"]
        assert response.headers["connection"] == "close"
        gate.write_text("open")

    options = ("--drain-timeout", "0.05")
    with running_teacher(
        model_folder, tmp_path / "log", *options, program=STAND_IN, ENGINE_WAITS_FOR=str(gate)
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 0
    log = teacher.log.read_text()
    assert "1 requests are not finished after 0.05 s" in log
    assert "reason=drained" in log
    assert "reason=engine_dead" not in log


def test_a_second_signal_ends_a_drain(model_folder: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        (accepted,) = await in_flight(teacher, GATED)
        teacher.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(teacher.until, "/readyz", 503)
        teacher.process.send_signal(signal.SIGINT)
        assert (await accepted).status_code == 503
        gate.write_text("open")

    options = ("--drain-timeout", "1000")
    with running_teacher(
        model_folder, tmp_path / "log", *options, program=STAND_IN, ENGINE_WAITS_FOR=str(gate)
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 130


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_replicas_that_are_replaced_under_load_lose_no_request(
    model_folder: Path, tmp_path: Path, full_size: bool
) -> None:
    """Two replicas are stopped by SIGTERM and started again in turn, under load."""
    rounds = 6 if full_size else 2
    sequence = SequenceRequest(prompt="the quick", completion=" fox" * 40)
    ports = [free_port(), free_port()]
    stopped: list[int] = []

    async def send_until(done: asyncio.Event, client: TeacherClient) -> int:
        completed = 0
        while not done.is_set():
            (score,) = await client.score([sequence], top_k=8)
            assert score.completion.text == (" fox" * 40).encode()
            completed += 1
        return completed

    async def replace(log: Path) -> None:
        for turn in range(rounds):
            teacher, stack = running[turn % 2]
            stopped.append(await asyncio.to_thread(teacher.stop))
            stack.__exit__(None, None, None)
            running[turn % 2] = await asyncio.to_thread(start, turn % 2, f"{turn}-again")

    def start(replica: int, name: str) -> tuple[RunningTeacher, Any]:
        context = running_teacher(model_folder, tmp_path / f"{replica}-{name}", port=ports[replica])
        return context.__enter__(), context

    async def scenario() -> int:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        done = asyncio.Event()
        async with (
            TeacherClient("math", urls, deadline_seconds=PATIENCE_SECONDS) as client,
            asyncio.TaskGroup() as group,
        ):
            senders = [group.create_task(send_until(done, client)) for _ in range(16)]
            await replace(tmp_path)
            done.set()
        return sum(task.result() for task in senders)

    running = [start(0, "first"), start(1, "first")]
    try:
        completed = asyncio.run(scenario())
    finally:
        for _, context in running:
            context.__exit__(None, None, None)
    assert stopped == [0] * rounds
    logger.info("%d requests succeeded over %d replacements", completed, rounds)
    assert completed > 0


def test_a_crashed_engine_ends_the_process_for_its_supervisor(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        (before,) = await in_flight(teacher, GATED)
        waits = await asyncio.to_thread(waiting_at, gate)
        doomed = await in_flight(teacher, {**LITTLE, "top_k": 13}, already=1)
        await asyncio.to_thread(teacher.until_metric, "mopd_queue_sequences", 1)
        doomed += await in_flight(teacher, LITTLE, 8, already=2)  # behind it
        os.write(waits, b"open")
        os.close(waits)
        assert (await before).status_code in (200, 503)  # scored, perhaps not yet written
        for request in doomed:
            response = await request
            assert response.status_code == 503
            assert "/opt" not in response.text

    with running_teacher(
        model_folder, tmp_path / "log", program=STAND_IN, ENGINE_WAITS_FOR=str(gate)
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 3
    last = teacher.log.read_text().splitlines()[-1]
    assert last == "mopd-teacher: the accelerator fell off the bus at /opt/secret/driver.so"


def test_an_engine_that_hangs_does_not_keep_the_process(model_folder: Path, tmp_path: Path) -> None:
    async def scenario(teacher: RunningTeacher) -> None:
        (waiting,) = await in_flight(teacher, {**LITTLE, "top_k": 17})
        teacher.process.send_signal(signal.SIGTERM)
        assert (await waiting).status_code == 503

    with running_teacher(
        model_folder, tmp_path / "log", "--drain-timeout", "0.1", program=STAND_IN
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 3
    assert "the engine does not stop" in teacher.log.read_text()


def test_json_logs_list_each_request_without_key_or_text(
    model_folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sesame-0001\n")
    options = ("--log-format", "json", "--api-key-file", str(keys))
    with running_teacher(model_folder, tmp_path / "log", *options) as teacher:
        headers = {"Authorization": "Bearer sesame-0001", "X-Request-Id": "run-7.step-3"}
        response = send(teacher, **headers)
        assert response.headers["x-request-id"] == "run-7.step-3"
        headers["Authorization"] = "Bearer sesame-0002"
        refused = send(teacher, **headers)
        assert refused.json()["instance"] == "run-7.step-3"
        assert teacher.stop() == 0
    text = teacher.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (scored,) = [line for line in lines if line["message"] == "scored"]
    assert scored["request_id"] == "run-7.step-3"
    assert scored["key"] == "alice"
    assert (scored["status"], scored["sequences"], scored["top_k"]) == (200, 1, 2)
    assert scored["tokens"] == len(response.json()["sequences"][0]["token_ids"])
    assert scored["prompt_tokens"] > 0
    phases = [scored[f"{name}_seconds"] for name in ("tokenize", "queue", "prefill", "encode")]
    assert 0 < sum(phases) <= scored["seconds"]
    (denied,) = [line for line in lines if line["message"] == "failed"]
    assert (denied["status"], denied["request_id"]) == (401, "run-7.step-3")
    assert "sesame" not in text
    assert "fox" not in text
