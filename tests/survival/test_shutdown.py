"""From the first moment to the last: loading, draining, and an engine that dies."""

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
#: What the stand-in answers only when its gate opens.
HELD = {**LITTLE, "top_k": 19}
STAND_IN = "tests.survival.unlucky_teacher"


def asked(teacher: RunningTeacher, **headers: str) -> httpx.Response:
    """The answer to a small request."""
    url = f"{teacher.url}/v1/logprobs"
    return httpx.post(url, json=LITTLE, headers=headers, timeout=PATIENCE_SECONDS)


async def post(teacher: RunningTeacher, body: Any) -> httpx.Response:
    """One scoring request over a connection of its own."""
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        return await client.post(f"{teacher.url}/v1/logprobs", json=body)


async def in_flight(
    teacher: RunningTeacher, body: Any, count: int = 1, already: int = 0
) -> list[Any]:
    """Requests that are being answered now, beside those that were ``already``."""
    asked = [asyncio.create_task(post(teacher, body)) for _ in range(count)]
    await asyncio.to_thread(teacher.until_metric, "mopd_requests_in_flight", already + count)
    return asked


def held_at(gate: Path) -> int:
    """Waits until somebody waits at the gate; what to write to, and to close, to let it go on."""
    while True:
        try:
            return os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody is there yet
                raise
            threading.Event().wait(0.01)


def test_while_the_model_loads_probes_are_answered_and_requests_told_to_wait(
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
        posted = asked(teacher)
        for answer in (teacher.get("/readyz"), teacher.get("/v1/manifest"), posted):
            assert answer.status_code == 503
            assert "loading its model" in answer.json()["detail"]
            assert int(answer.headers["retry-after"]) >= 1
            assert "secret-qwen" not in answer.text
        gate.write_text("go on")
        teacher.until("/readyz", 200)
        assert asked(teacher).status_code == 200


def test_a_teacher_that_is_told_to_stop_while_it_loads_stops_at_once(
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


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        accepted = await in_flight(teacher, HELD)
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
        gate.write_text("go on")
        for request in accepted:
            answer = await request
            assert answer.status_code == 200
            assert len(answer.json()["sequences"]) == 1

    options = ("--drain-timeout", str(PATIENCE_SECONDS))
    with running_teacher(
        model_folder, tmp_path / "log", *options, program=STAND_IN, ENGINE_WAITS_FOR=str(gate)
    ) as teacher:
        asyncio.run(scenario(teacher))
        assert teacher.process.wait(PATIENCE_SECONDS) == 0


def test_what_a_drain_cannot_finish_in_its_time_is_told_so(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        (accepted,) = await in_flight(teacher, HELD)
        teacher.process.send_signal(signal.SIGTERM)
        answer = await accepted
        assert answer.status_code == 503
        assert "has shut down" in answer.json()["detail"]
        assert answer.headers["connection"] == "close"
        gate.write_text("go on")

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
        (accepted,) = await in_flight(teacher, HELD)
        teacher.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(teacher.until, "/readyz", 503)
        teacher.process.send_signal(signal.SIGINT)
        assert (await accepted).status_code == 503
        gate.write_text("go on")

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
    """Two replicas are stopped by SIGTERM and started again in turn, while clients ask on."""
    rounds = 6 if full_size else 2
    sequence = SequenceRequest(prompt="the quick", completion=" fox" * 40)
    ports = [free_port(), free_port()]
    stopped: list[int] = []

    async def ask_until(done: asyncio.Event, client: TeacherClient) -> int:
        answered = 0
        while not done.is_set():
            (score,) = await client.score([sequence], top_k=8)
            assert score.completion.text == (" fox" * 40).encode()
            answered += 1
        return answered

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
            asking = [group.create_task(ask_until(done, client)) for _ in range(16)]
            await replace(tmp_path)
            done.set()
        return sum(task.result() for task in asking)

    running = [start(0, "first"), start(1, "first")]
    try:
        answered = asyncio.run(scenario())
    finally:
        for _, context in running:
            context.__exit__(None, None, None)
    assert stopped == [0] * rounds
    logger.info("%d requests were answered over %d replacements", answered, rounds)
    assert answered > 0


def test_an_engine_that_dies_ends_the_process_for_a_supervisor_to_see(
    model_folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def scenario(teacher: RunningTeacher) -> None:
        (before,) = await in_flight(teacher, HELD)
        waits = await asyncio.to_thread(held_at, gate)
        doomed = await in_flight(teacher, {**LITTLE, "top_k": 13}, already=1)
        await asyncio.to_thread(teacher.until_metric, "mopd_queue_sequences", 1)
        doomed += await in_flight(teacher, LITTLE, 8, already=2)  # behind it
        os.write(waits, b"go on")
        os.close(waits)
        assert (await before).status_code in (200, 503)  # scored, perhaps not yet written
        for request in doomed:
            answer = await request
            assert answer.status_code == 503
            assert "/opt" not in answer.text

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


def test_json_logs_tell_each_request_and_neither_key_nor_text(
    model_folder: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sesame-0001\n")
    options = ("--log-format", "json", "--api-key-file", str(keys))
    with running_teacher(model_folder, tmp_path / "log", *options) as teacher:
        headers = {"Authorization": "Bearer sesame-0001", "X-Request-Id": "run-7.step-3"}
        answer = asked(teacher, **headers)
        assert answer.headers["x-request-id"] == "run-7.step-3"
        headers["Authorization"] = "Bearer sesame-0002"
        refused = asked(teacher, **headers)
        assert refused.json()["instance"] == "run-7.step-3"
        assert teacher.stop() == 0
    text = teacher.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (scored,) = [line for line in lines if line["message"] == "scored"]
    assert scored["request_id"] == "run-7.step-3"
    assert scored["key"] == "alice"
    assert (scored["status"], scored["sequences"], scored["top_k"]) == (200, 1, 2)
    assert scored["tokens"] == len(answer.json()["sequences"][0]["token_ids"])
    assert scored["prompt_tokens"] > 0
    phases = [scored[f"{name}_seconds"] for name in ("tokenize", "queue", "prefill", "encode")]
    assert 0 < sum(phases) <= scored["seconds"]
    (denied,) = [line for line in lines if line["message"] == "failed"]
    assert (denied["status"], denied["request_id"]) == (401, "run-7.step-3")
    assert "sesame" not in text
    assert "fox" not in text
