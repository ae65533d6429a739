"""A pool of real models, of which one at a time has its weights in memory."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mopd_client import TeacherClient
from mopd_protocol.errors import ConfigError
from mopd_protocol.requests import SequenceRequest
from mopd_server.app import create_app
from mopd_server.engines.base import EngineCrashError
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.pool.app import LifecycleGroup, PoolApp
from mopd_server.pool.reloadable_engine import ReloadableEngine
from mopd_server.pool.teacher_pool import TeacherPool
from mopd_server.scoring.batching import Batcher
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import PoolSettings, TeacherSettings
from tests import tiny_models
from tests.server.compatible.expected_rows import send
from tests.server.tiny_teachers import FAMILIES, get, post_async, problem

BODY: dict[str, Any] = {
    "sequences": [{"prompt": "the quick", "completion": " fox 3 + 4"}] * 2,
    "top_k": 5,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for name, (make_model, make_tokenizer) in FAMILIES.items():
        tokenizer = make_tokenizer()
        folder = tmp_path_factory.mktemp("models") / name
        folders[name] = tiny_models.save(make_model(tokenizer), tokenizer, folder)
    return folders


def settings_of(folders: dict[str, Path], **options: Any) -> dict[str, TeacherSettings]:
    return {
        name: TeacherSettings(model=str(folder), name=name, device="cpu", **options)
        for name, folder in folders.items()
    }


def pooled(folders: dict[str, Path], resident: int, **options: Any) -> tuple[TeacherPool, PoolApp]:
    pool = TeacherPool(settings_of(folders, **options), PoolSettings(resident=resident))
    for _, service in pool.load():
        service.warm_up()
        assert service.failure is None
    lifecycles = {name: Lifecycle(service) for name, service in pool.services.items()}
    apps = {name: create_app(lifecycle) for name, lifecycle in lifecycles.items()}
    return pool, PoolApp(apps, LifecycleGroup(lifecycles), pool.exposition)


async def score(app: Any, prefix: str = "") -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pool") as client:
        return await client.post(f"{prefix}/v1/logprobs", json=BODY)


@pytest.mark.parametrize("resident", [1, 2])
def test_scores_and_manifests_equal_those_of_single_services(
    folders: dict[str, Path], resident: int
) -> None:
    pool, app = pooled(folders, resident)

    async def scenario() -> dict[str, list[httpx.Response]]:
        turns = [
            asyncio.gather(*(score(app, f"/teachers/{name}") for name in folders)) for _ in range(3)
        ]
        return dict(zip(folders, zip(*[await turn for turn in turns], strict=True), strict=True))

    responses = asyncio.run(scenario())
    assert sum(engine.loaded for engine in pool._engines.values()) <= resident
    for name, settings in settings_of(folders).items():
        single = TeacherService.load(settings)
        single.warm_up()
        expected = asyncio.run(post_async(create_app(single), BODY)).json()
        for response in responses[name]:
            assert response.status_code == 200, response.text
            scored = response.json()
            assert scored["checksum"] == expected["checksum"]
            assert scored["sequences"] == expected["sequences"]
        manifest = get(app, f"/teachers/{name}/v1/manifest").json()  # type: ignore[arg-type]
        assert manifest == single.manifest.model_dump(mode="json")
        assert pool.residency.teachers[name].swaps >= 1
        single.close()
    assert sum(each.swaps for each in pool.residency.teachers.values()) > len(folders)
    metrics = get(app, "/metrics").text  # type: ignore[arg-type]
    assert f'mopd_pool_resident{{teacher="{next(iter(folders))}"}}' in metrics
    assert get(app, "/readyz").status_code == 200  # type: ignore[arg-type]
    problem(get(app, "/teachers/none/v1/manifest"), 404, "not_found")  # type: ignore[arg-type]


def test_compatible_routes_are_below_the_path_of_each_teacher(folders: dict[str, Path]) -> None:
    _, app = pooled(folders, 1)
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 3}
    for name in folders:
        [card] = get(app, f"/teachers/{name}/v1/models").json()["data"]  # type: ignore[arg-type]
        assert card["id"] == name
        response = send(app, f"/teachers/{name}/v1/completions", {**body, "model": name})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
    problem(send(app, "/v1/completions", body), 404, "not_found")


def test_queues_are_emptied_before_a_swap(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen batches of each of two teachers, all queued: a swap to each, not one per batch.

    Scoring takes milliseconds, so that no other swap is worth its cost.
    """
    pool, app = pooled({name: folders[name] for name in ("qwen", "llama")}, 1, max_batch_tokens=16)
    clock, swap, run, score_batch = [0.0], pool._swap, Batcher._run_engine, ReloadableEngine.score
    queued, batches = threading.Event(), []

    def timed_swap(name: str, victim: str | None) -> None:
        swap(name, victim)
        clock[0] += 1.0

    def counted(batcher: Batcher, batch: Any, tokens: int) -> Any:
        batches.append(len(batch))
        return run(batcher, batch, tokens)

    def gated(engine: ReloadableEngine, batch: Any, **options: Any) -> Any:
        assert queued.wait(600)
        return score_batch(engine, batch, **options)

    def now() -> float:
        clock[0] += 1e-3
        return clock[0]

    pool.residency._swap, pool.residency._now = timed_swap, now
    monkeypatch.setattr(Batcher, "_run_engine", counted)
    monkeypatch.setattr(ReloadableEngine, "score", gated)
    before = sum(each.swaps for each in pool.residency.teachers.values())
    requests = [f"/teachers/{name}" for _ in range(8) for name in pool.services]

    async def scenario() -> list[httpx.Response]:
        running = asyncio.gather(*(score(app, path) for path in requests))
        scorers = [service._scorer for service in pool.services.values()]
        sequences = len(BODY["sequences"]) * len(requests)
        while sum(each.queued_sequences for each in scorers) + sum(batches) < sequences:
            await asyncio.sleep(0.001)
        queued.set()
        return await running

    assert {response.status_code for response in asyncio.run(scenario())} == {200}
    assert len(batches) == 32
    assert sum(each.swaps for each in pool.residency.teachers.values()) - before <= 2


def test_client_uses_the_address_of_a_teacher_of_a_pool(folders: dict[str, Path]) -> None:
    pool, app = pooled({"qwen": folders["qwen"]}, 1)

    async def scenario() -> bytes:
        url = "http://pool/teachers/qwen"
        async with TeacherClient("qwen", [url], transport=httpx.ASGITransport(app)) as client:
            await client.wait_until_ready(60.0)
            sequence = SequenceRequest(prompt="the quick", completion=" fox")
            (scored,) = await client.score([sequence], top_k=2)
            return scored.completion.text

    assert asyncio.run(scenario()) == b" fox"
    assert pool.services["qwen"].manifest.service == "qwen"


def test_changed_checkpoint_is_not_served(folders: dict[str, Path]) -> None:
    name = "qwen"
    pool, _ = pooled({name: folders[name]}, 1)
    engine = pool._engines[name]
    engine.load()
    description = engine.description
    engine.release()
    engine._description = replace(description, revision="another")
    with pytest.raises(EngineCrashError):
        engine.load()


def test_engine_without_reloading_is_rejected(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        TeacherPool(settings_of(folders, engine="uniform"), PoolSettings())
    assert caught.value.key == "engine"


def test_released_weights_use_no_memory(folders: dict[str, Path]) -> None:
    pool, _ = pooled({"qwen": folders["qwen"]}, 1)
    engine = pool._engines["qwen"]
    model: Any = engine._engine._model  # type: ignore[union-attr]
    assert sum(each.untyped_storage().nbytes() for each in model.parameters()) > 0
    engine.release()
    tensors = [*model.parameters(), *model.buffers()]
    assert sum(each.untyped_storage().nbytes() for each in tensors) == 0
