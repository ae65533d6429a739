"""Teacher services in process, without a network, that record their scoring requests."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mopd_client.pool import TeacherPool
from mopd_client.teacher_client import TeacherClient
from mopd_losses.projection.cache import ProjectionCache
from mopd_trainer.config.run import TeacherConfig
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import connect_teachers
from mopd_trainer.teachers.scoring import RolloutScorer
from tests.client.still_clock import StillClock

SCORING = "/v1/logprobs"


@dataclass
class Recorded(httpx.AsyncBaseTransport):
    """Transport to an app that records the bodies of scoring requests."""

    app: FastAPI
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    broken: bool = False
    """If true, scoring requests fail to connect."""
    failures: int = 0
    """Number of further scoring requests that fail to connect."""
    on_scoring: Callable[[], None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the app's response."""
        if request.url.path == SCORING:
            self.requests.append(json.loads(request.content))
            if self.on_scoring is not None:
                self.on_scoring()
            self.failures -= 1
            if self.broken or self.failures >= 0:
                raise httpx.ConnectError("connection refused", request=request)
        return await httpx.ASGITransport(self.app).handle_async_request(request)

    @property
    def sequences(self) -> list[dict[str, Any]]:
        """All requested sequences, in order."""
        return [sequence for body in self.requests for sequence in body["sequences"]]


def teacher_config(**settings: Any) -> TeacherConfig:
    """Return the settings of a teacher in process."""
    return TeacherConfig.model_validate({"url": "http://teacher", "top_k": 8, **settings})


def serve_in_process(monkeypatch: pytest.MonkeyPatch, transports: Mapping[str, Recorded]) -> None:
    """Connect the teachers of complete runs to apps by their names, not by their URLs."""

    def pool(configs: Mapping[str, TeacherConfig], _: object, **_others: object) -> TeacherPool:
        return TeacherPool(
            {
                name: TeacherClient(name, config.url, transport=transports[name], verify=0)
                for name, config in configs.items()
            }
        )

    monkeypatch.setattr("mopd_trainer.setup.teacher_pool", pool)


@asynccontextmanager
async def scorer_of(
    student: StudentIdentity,
    teachers: Mapping[str, tuple[Recorded, TeacherConfig]],
) -> AsyncIterator[RolloutScorer]:
    """Connect to the teachers and return a scorer."""
    clock = StillClock().clock  # retries of a broken teacher take no time
    clients = {
        name: TeacherClient(
            name,
            config.url,
            transport=transport,
            deadline_seconds=config.deadline_seconds,
            clock=clock,
            verify=config.verify if "verify" in config.model_fields_set else 0,
        )
        for name, (transport, config) in teachers.items()
    }
    async with TeacherPool(clients) as pool:
        configs = {name: config for name, (_, config) in teachers.items()}
        connected = await connect_teachers(
            pool, configs, student, ProjectionCache(), {}, wait_seconds=60.0
        )
        yield RolloutScorer(pool, connected, student.table, clock=clock)
