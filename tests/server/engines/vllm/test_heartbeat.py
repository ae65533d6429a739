"""Tests of the detection of an engine that hangs, and of its recovery."""

import asyncio

import pytest

from mopd_server.app import create_app
from mopd_server.engines.vllm.processes.heartbeat import Heartbeat
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.pool.app import LifecycleGroup, PoolApp
from mopd_server.scoring.batching import Batcher
from tests.server.scoring.test_batching import Trial
from tests.server.tiny_teachers import SMALL, TinyTeacher, get, post, problem


class Clock:
    """Time that only the test advances."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_batch_far_above_its_expected_time_is_silence_until_it_ends() -> None:
    clock = Clock()
    trial = Trial(now=clock)

    async def scenario() -> None:
        first = await trial.block()
        clock.seconds += 2.0  # 5 tokens per second
        trial.engine.gate.set()
        await first
        assert trial.batcher.silent_seconds == 0.0
        running = await trial.block()
        clock.seconds += 20.0
        assert trial.batcher.silent_seconds == 0.0
        clock.seconds += 7.0
        assert trial.batcher.silent_seconds == pytest.approx(7.0)
        trial.engine.gate.set()
        await running
        assert trial.batcher.silent_seconds == 0.0

    asyncio.run(scenario())


def test_pending_health_check_is_silence_until_its_response() -> None:
    clock = Clock()

    async def scenario() -> None:
        response = asyncio.Event()
        heartbeat = Heartbeat(response.wait, clock)
        assert heartbeat.silent_seconds == 0.0
        checking = asyncio.create_task(heartbeat.run())
        await asyncio.sleep(0)
        clock.seconds += 11.0
        assert heartbeat.silent_seconds == 11.0
        response.set()
        while heartbeat.silent_seconds:
            await asyncio.sleep(0)
        checking.cancel()

    asyncio.run(scenario())


def test_hung_engine_is_first_not_ready_and_later_not_alive(
    qwen_teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Lifecycle(qwen_teacher.service, liveness_seconds=60)
    app = create_app(life)
    pool = PoolApp({"a": app}, LifecycleGroup({"a": life}), bytes)
    for seconds, alive in ((11.0, 200), (61.0, 503)):
        with monkeypatch.context() as patched:
            patched.setattr(Batcher, "silent_seconds", seconds)
            response = post(app, SMALL)
            assert int(response.headers["retry-after"]) >= 1
            for refused in (response, get(app, "/readyz"), get(pool, "/readyz")):
                problem(refused, 503, "stalled")
            assert "mopd_ready 0.0" in get(app, "/metrics").text
            for health in (get(app, "/healthz"), get(app, "/health"), get(pool, "/healthz")):
                assert health.status_code == alive
            assert alive == 200 or health.json()["code"] == "stalled"
    for path in ("/readyz", "/healthz"):
        assert get(app, path).status_code == get(pool, path).status_code == 200
    assert post(app, SMALL).status_code == 200
