"""A pool of engines in separate processes, replaced by stand-ins."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, EngineDescription, EngineTimes, ScoringTask
from mopd_server.pool import teacher_pool
from mopd_server.pool.teacher_pool import TeacherPool
from mopd_server.service_error import ServiceError
from mopd_server.settings import PoolSettings, TeacherSettings
from tests import tiny_models

NAMES = "abc"


@dataclass
class Host:
    """The stand-ins of a test: what happened, and what is in memory."""

    can_suspend: bool
    events: list[tuple[str, str]] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    most: int = 0
    settings: list[TeacherSettings] = field(default_factory=list)
    engines: dict[str, "StandIn"] = field(default_factory=dict)
    fail: str = ""

    def load(self, settings: TeacherSettings, table: Any) -> "StandIn":
        """Replace ``registry.load_engine``."""
        name = settings.service_name
        if name == self.fail:
            raise RuntimeError("no memory")
        self.settings.append(settings)
        self.engines[name] = StandIn(self, name, len(table.present))
        return self.engines[name]


class StandIn(AsyncEngine):
    """The log-probability of every token is the number of the teacher."""

    def __init__(self, host: Host, name: str, width: int) -> None:
        self.host, self.name, self.width = host, name, width
        self.crash: Callable[[str], None] = lambda cause: None
        self.silent = 0.0
        self.gate: Callable[[], None] = lambda: None
        self._enter("start")

    def _enter(self, event: str) -> None:
        self.host.events.append((event, self.name))
        self.host.loaded.add(self.name)
        self.host.most = max(self.host.most, len(self.host.loaded))

    def _leave(self, event: str) -> None:
        self.host.events.append((event, self.name))
        self.host.loaded.remove(self.name)

    @property
    def description(self) -> EngineDescription:
        return EngineDescription(
            engine="stand-in", engine_version="1", model=self.name, revision="none",
            dtype="float32", logit_width=self.width, max_model_len=1024, candidate_ids=False,
            temperature=True,
        )  # fmt: skip

    @property
    def silent_seconds(self) -> float:
        return self.silent

    @property
    def can_suspend(self) -> bool:
        return self.host.can_suspend

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        assert self.name in self.host.loaded
        await asyncio.to_thread(self.gate)
        rows = len(task.completion_ids)
        value = np.full(rows, -10.0 - NAMES.index(self.name), dtype=np.float32)
        ids = np.tile(np.arange(top_k, dtype=np.int32), (rows, 1))
        logprobs = np.repeat(value[:, None], top_k, axis=1)
        tails = np.log1p(-np.exp(logprobs).sum(axis=1))
        return TopKLogprobs(ids, logprobs, value, tails), EngineTimes(0.0, 0.0)

    def on_crash(self, callback: Callable[[str], None]) -> None:
        self.crash = callback

    def suspend(self) -> None:
        self._leave("sleep")

    def resume(self) -> None:
        self._enter("wake")

    def close(self) -> None:
        self.host.events.append(("close", self.name))
        self.host.loaded.discard(self.name)


@pytest.fixture
def pooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool, int], tuple[TeacherPool, Host]]:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "model")

    def make(can_suspend: bool, resident: int) -> tuple[TeacherPool, Host]:
        host = Host(can_suspend)
        monkeypatch.setattr(teacher_pool, "load_engine", host.load)
        base = TeacherSettings(model=str(folder), engine="vllm", max_batch_tokens=64)
        settings = {name: replace(base, name=name) for name in NAMES}
        pool = TeacherPool(settings, PoolSettings(resident=resident))
        for _, service in pool.load():
            service.warm_up()
            assert service.ready, service.failure
        return pool, host

    return make


async def score(pool: TeacherPool, name: str) -> set[float]:
    sequence = {"prompt": "3 + 4", "completion": " 12 and 7"}
    request = LogprobsRequest.model_validate({"sequences": [sequence] * 2, "top_k": 2})
    response = await pool.services[name].score(request)
    assert response.manifest_id == pool.services[name].manifest.manifest_id
    return {float(value) for each in response.scores for value in each.topk.token_logprobs}


@pytest.mark.parametrize("can_suspend", [True, False])
@pytest.mark.parametrize("resident", [1, 2])
def test_every_request_is_scored_by_its_teacher(
    pooled: Callable[..., tuple[TeacherPool, Host]], can_suspend: bool, resident: int
) -> None:
    pool, host = pooled(can_suspend, resident)

    async def scenario() -> list[set[float]]:
        return await asyncio.gather(*(score(pool, name) for name in NAMES * 20))

    assert asyncio.run(scenario()) == [{-10.0}, {-11.0}, {-12.0}] * 20
    assert host.most == resident
    assert not {"close"} & {event for event, _ in host.events} or not can_suspend
    # A restart has the settings of the first start; the memory is shared by the resident engines.
    assert {each.name for each in host.settings} == set(NAMES)
    assert len({replace(each, name="") for each in host.settings}) == 1
    assert {(each.max_batch_tokens, each.pool_resident) for each in host.settings} == {
        (64, resident)
    }
    pool.close()
    assert not host.loaded
    ended = {name for event, name in host.events if event == "close"}
    assert ended == set(NAMES)


def test_resident_teachers_score_at_the_same_time(
    pooled: Callable[..., tuple[TeacherPool, Host]],
) -> None:
    pool, host = pooled(False, 2)
    both = threading.Barrier(len(host.loaded) * 2)  # two sequences of each of two requests
    resident = sorted(host.loaded)
    for name in resident:
        host.engines[name].gate = lambda: both.wait(60) and None

    async def scenario() -> list[set[float]]:
        return await asyncio.gather(*(score(pool, name) for name in resident))

    assert len(asyncio.run(scenario())) == 2
    pool.close()


def test_failed_restart_is_reported_with_its_cause(
    pooled: Callable[..., tuple[TeacherPool, Host]],
) -> None:
    pool, host = pooled(False, 1)
    causes: list[str] = []
    pool.services["a"].on_engine_crash = causes.append
    host.fail = "a"

    async def scenario() -> set[float]:
        with pytest.raises(ServiceError) as caught:
            await score(pool, "a")
        assert (caught.value.status, caught.value.code) == (503, "engine_dead")
        return await score(pool, "b")  # until the process exits

    assert asyncio.run(scenario()) == {-11.0}
    (cause,) = causes
    assert "no memory" in cause
    pool.close()


def test_exit_and_silence_of_a_resident_engine_are_reported(
    pooled: Callable[..., tuple[TeacherPool, Host]],
) -> None:
    pool, host = pooled(False, 1)
    (name,) = host.loaded
    service = pool.services[name]
    host.engines[name].silent = 60.0
    assert service.stalled
    host.engines[name].silent = 0.0
    causes: list[str] = []
    service.on_engine_crash = causes.append
    host.engines[name].crash("killed")
    assert causes == [service.failure] == ["killed"]
    pool.close()
