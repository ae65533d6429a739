"""Another model comes up under the address of a teacher, between two requests."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import DataError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_server.app import create_app
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models

SEQUENCE = SequenceRequest(prompt="the quick", completion=" fox")


@dataclass
class Address(httpx.AsyncBaseTransport):
    """The service that currently has the address."""

    teacher: TeacherService

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Forward the request to the current service."""
        return await httpx.ASGITransport(create_app(self.teacher)).handle_async_request(request)


def loaded(folder: Path, seed: int) -> TeacherService:
    """A teacher that differs from others of this test only in its weights."""
    tokenizer = tiny_models.digit_tokenizer()
    tiny_models.save(tiny_models.qwen(tokenizer, seed=seed), tokenizer, folder)
    service = TeacherService.load(
        TeacherSettings(model=str(folder), device="cpu", engine="transformers")
    )
    service.warm_up()
    return service


def test_another_model_under_the_same_address_is_rejected(tmp_path: Path) -> None:
    first = loaded(tmp_path / "first" / "teacher", seed=0)
    other = loaded(tmp_path / "other" / "teacher", seed=1)
    again = loaded(tmp_path / "again" / "teacher", seed=0)
    assert again.manifest == first.manifest
    assert other.manifest.manifest_id != first.manifest.manifest_id
    address = Address(first)

    async def scenario() -> list[TeacherScore]:
        async with TeacherClient("math", ["http://teacher"], transport=address) as client:
            before = await client.score([SEQUENCE], top_k=2)
            address.teacher = other
            with pytest.raises(DataError, match=r"'math' at .* has changed"):
                await client.score([SEQUENCE], top_k=2)
            address.teacher = first
            assert (await client.score([SEQUENCE], top_k=2))[0].topk.ids.tolist() == (
                before[0].topk.ids.tolist()
            )
            return before

    assert asyncio.run(scenario())[0].manifest_id == first.manifest.manifest_id
