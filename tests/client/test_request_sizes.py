"""Scores do not depend on the size of a call: bodies, sequences and responses of any size.

Real clients and services in one process; the sizes are on either side of each limit.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from mopd_client import request_parts
from mopd_client.request_parts import parts_of
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message, TeacherScore
from mopd_server.app import create_app
from mopd_server.http.body_parts import MOST_LISTS
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.request_body import LARGE_BYTES
from mopd_server.http.scoring_response import LARGE_RESPONSE_ENTRIES
from mopd_server.pool.app import LifecycleGroup, PoolApp
from mopd_server.pool.teacher_pool import TeacherPool
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import PoolSettings, TeacherSettings
from tests import tiny_models

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.anyio

PATHS = {"service": "", "adapter": "/adapters/sums", "pool": "/teachers/math"}

#: Sequences, tokens of each prompt and completion, and entries of a row. The body of the second is
#: above 64 KiB, and the response of the third above 64 Ki entries.
SHAPES = {"small": (16, 60, 20, 4), "large body": (160, 100, 20, 4), "large": (160, 20, 20, 32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, with an adapter in it."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    tiny_models.save(model, tokenizer, folder)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder / "sums")
    return folder


@pytest.fixture(scope="module")
def apps(folder: Path) -> Iterator[dict[str, Any]]:
    """Applications by the kind of ``PATHS``."""
    settings = TeacherSettings(
        model=str(folder),
        name="math",
        device="cpu",
        engine="transformers",
        adapter=(f"sums={folder / 'sums'}",),
    )
    service = TeacherService.load(settings)
    service.warm_up()
    plain = TeacherSettings(model=str(folder), name="math", device="cpu", engine="transformers")
    pool = TeacherPool({"math": plain}, PoolSettings(resident=1))
    for _, pooled in pool.load():
        pooled.warm_up()
    lifecycles = {name: Lifecycle(each) for name, each in pool.services.items()}
    pool_app = PoolApp(
        {name: create_app(each) for name, each in lifecycles.items()},
        LifecycleGroup(lifecycles),
        pool.exposition,
    )
    app = create_app(service)
    yield {"service": app, "adapter": app, "pool": pool_app}
    service.close()


@asynccontextmanager
async def client_of(apps: dict[str, Any], kind: str) -> AsyncIterator[TeacherClient]:
    """A client of two replicas."""
    urls = [f"http://{name}{PATHS[kind]}" for name in ("one", "two")]
    transport = httpx.ASGITransport(apps[kind])
    async with TeacherClient("math", urls, transport=transport) as client:
        yield client


def sequences_of(count: int, prompt: int, completion: int, form: str) -> list[SequenceRequest]:
    """Random prompts and completions, as ids, or as text of at least that many tokens."""
    draw = np.random.default_rng(0)
    if form == "ids":
        return [
            SequenceRequest(
                prompt_token_ids=draw.integers(100, 400, prompt).tolist(),
                completion_token_ids=draw.integers(100, 400, completion).tolist(),
            )
            for _ in range(count)
        ]
    digits = [draw.integers(0, 10, prompt + completion).astype(str) for _ in range(count)]
    return [
        SequenceRequest(
            messages=[Message(role="user", content="".join(each[:prompt]))],
            completion="".join(each[prompt:]),
        )
        for each in digits
    ]


async def one_by_one(
    client: TeacherClient, sequences: Sequence[SequenceRequest], **options: Any
) -> list[TeacherScore]:
    """Score a request for each sequence."""
    scores = await asyncio.gather(*[client.score([each], **options) for each in sequences])
    return [score for [score] in scores]


def assert_close(scores: Sequence[TeacherScore], expected: Sequence[TeacherScore]) -> None:
    for left, right in zip(scores, expected, strict=True):
        assert left.completion.token_ids.tolist() == right.completion.token_ids.tolist()
        for name in ("token_logprobs", "logprobs", "tail_logprobs"):
            actual, reference = getattr(left.topk, name), getattr(right.topk, name)
            np.testing.assert_allclose(actual, reference, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["ids", "text"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PATHS)
async def test_scores_do_not_depend_on_the_size_of_the_call(
    apps: dict[str, Any], kind: str, shape: str, form: str
) -> None:
    count, prompt, completion, top_k = SHAPES[shape]
    sequences = sequences_of(count, prompt, completion, form)
    if form == "text" and shape == "large body":
        padding = " " * (LARGE_BYTES // count)  # of one token or few, in a template's message
        sequences = [
            each.model_copy(update={"chat_template_kwargs": {"unused": padding}})
            for each in sequences
        ]
    body = sum(len(each.model_dump_json(exclude_none=True)) for each in sequences)
    assert (body > LARGE_BYTES) == (shape == "large body")
    assert (count * completion * top_k > LARGE_RESPONSE_ENTRIES) == (shape == "large")
    async with client_of(apps, kind) as client:
        scores = await client.score(sequences, top_k=top_k)
        assert_close(scores[::8], await one_by_one(client, sequences[::8], top_k=top_k))
        assert client.counters.retries == client.counters.failures == 0


async def test_more_sequences_than_a_request_may_have_are_scored(apps: dict[str, Any]) -> None:
    sequences = sequences_of(4, 3, 2, "ids") * 1030  # 4,096 are the limit of a request
    async with client_of(apps, "service") as client:
        scores = await client.score(sequences, top_k=2)
        assert_close(scores, await one_by_one(client, sequences[:4], top_k=2) * 1030)
        assert client.counters.requests > 5


async def test_more_candidate_lists_than_a_request_may_have_are_scored(
    apps: dict[str, Any],
) -> None:
    draw = np.random.default_rng(0)
    [sequence] = sequences_of(1, 6, 240, "ids")
    candidates = [draw.choice(np.arange(100, 400), 2, replace=False).tolist() for _ in range(240)]
    sequence = sequence.model_copy(update={"candidate_ids": candidates})
    count = MOST_LISTS // 240 + 1
    async with client_of(apps, "service") as client:
        scores = await client.score([sequence] * count, top_k=2)
        [expected] = await client.score([sequence], top_k=2)
    assert_close(scores, [expected] * count)


@pytest.mark.parametrize("limit", request_parts.LIMITS)
@pytest.mark.parametrize("form", ["ids", "text"])
def test_parts_are_as_large_as_each_limit_allows(
    limit: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [
        each.model_copy(update={"candidate_ids": [[1, 2]] * 3})
        for each in sequences_of(10, 4, 3, form)
    ]
    assert parts_of(sequences, top_k=5) == [slice(0, 10)]
    size = request_parts.size_of(sequences[0], 5)[limit]
    for fitting, expected in ((3, [0, 3, 6, 9]), (10, [0]), (0.5, [*range(10)])):
        monkeypatch.setitem(request_parts.LIMITS, limit, int(size * fitting))
        parts = parts_of(sequences, top_k=5)
        assert [part.start for part in parts] == expected
        assert [each for part in parts for each in sequences[part]] == sequences


@pytest.mark.parametrize("form", ["ids", "text"])
def test_a_sequence_is_at_most_as_large_as_its_estimate(form: str) -> None:
    [sequence] = sequences_of(1, 40, 30, form)
    if form == "text":
        strange = '\x00"\\\u2028🙂'
        sequence = sequence.model_copy(update={"completion": strange})
    sequence = sequence.model_copy(update={"candidate_ids": [[2**31 - 1] * 7] * 3})
    size = request_parts.size_of(sequence, 5)
    assert size["bytes"] >= len(sequence.model_dump_json(exclude_none=True).encode())
