"""Real teacher services without a network, which remember what they were asked."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
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
    """Hands requests to an app, and keeps the bodies of those that ask for scores."""

    app: FastAPI
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    broken: bool = False
    """Whether scoring requests find nobody."""
    absent: int = 0
    """How many more scoring requests find nobody."""
    on_scoring: Callable[[], None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The app's answer."""
        if request.url.path == SCORING:
            self.asked.append(json.loads(request.content))
            if self.on_scoring is not None:
                self.on_scoring()
            self.absent -= 1
            if self.broken or self.absent >= 0:
                raise httpx.ConnectError("nobody is there", request=request)
        return await httpx.ASGITransport(self.app).handle_async_request(request)

    @property
    def sequences(self) -> list[dict[str, Any]]:
        """Every sequence that was asked about, in order."""
        return [sequence for body in self.asked for sequence in body["sequences"]]


def teacher_config(**settings: Any) -> TeacherConfig:
    """Settings of a teacher in process."""
    return TeacherConfig.model_validate({"url": "http://teacher", "top_k": 8, **settings})


@asynccontextmanager
async def scorer_of(
    student: StudentIdentity,
    teachers: Mapping[str, tuple[Recorded, TeacherConfig]],
) -> AsyncIterator[RolloutScorer]:
    """A scorer that has met the teachers."""
    clock = StillClock().clock  # retries of a broken teacher take no time
    clients = {
        name: TeacherClient(
            name,
            config.url,
            transport=transport,
            deadline_seconds=config.deadline_seconds,
            clock=clock,
        )
        for name, (transport, config) in teachers.items()
    }
    async with TeacherPool(clients) as pool:
        configs = {name: config for name, (_, config) in teachers.items()}
        met = await connect_teachers(
            pool, configs, student, ProjectionCache(), {}, wait_seconds=60.0
        )
        yield RolloutScorer(pool, met, student.table, clock=clock)
