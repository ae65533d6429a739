"""Thousands of requests, and more than fit the queue: every one is scored correctly."""

import asyncio
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary
from mopd_protocol.requests import SequenceRequest
from tests.reference.teacher_scores import next_token_logprobs
from tests.survival.running_teacher import PATIENCE_SECONDS, RunningTeacher, running_teacher

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.process

IN_FLIGHT = 64
VOCABULARY = 420  # of tiny_models.digit_tokenizer
CHECKED_EACH = 50
ALLOCATOR_MEBIBYTES = 64
QUEUE_FULL = 'mopd_request_errors_total{reason="queue_full"}'


def body(number: int) -> dict[str, Any]:
    """Request ``number``: 1 to 500 tokens, the first of them the prompt, and some k."""
    chance = random.Random(number)
    ids = [chance.randrange(VOCABULARY) for _ in range(chance.randint(2, 500))]
    prompt = chance.randint(1, len(ids) - 1)
    return {
        "sequences": [
            {
                "id": str(number),
                "prompt_token_ids": ids[:prompt],
                "completion_token_ids": ids[prompt:],
            }
        ],
        "top_k": chance.choice([1, 4, 64, VOCABULARY]),
    }


async def send(client: httpx.AsyncClient, number: int) -> bytes:
    """Send request ``number``, which has to succeed; its binary response."""
    headers = {"accept": BINARY_MEDIA_TYPE}
    response = await client.post("/v1/logprobs", json=body(number), headers=headers)
    assert response.status_code == 200, response.text
    return response.content


async def send_all(teacher: RunningTeacher, numbers: range) -> dict[int, bytes]:
    """Send the requests, ``IN_FLIGHT`` at a time; every ``CHECKED_EACH``-th response."""
    kept: dict[int, bytes] = {}
    waiting = iter(numbers)

    async def send_in_turn(client: httpx.AsyncClient) -> None:
        for number in waiting:
            response = await send(client, number)
            assert decode_binary(response).ids == (str(number),)
            if number % CHECKED_EACH == 0:
                kept[number] = response

    async with (
        httpx.AsyncClient(base_url=teacher.url, timeout=PATIENCE_SECONDS) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(IN_FLIGHT):
            group.create_task(send_in_turn(client))
    return kept


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_requests_are_scored_correctly_and_release_their_resources(
    model_folder: Path, tmp_path: Path, full_size: bool
) -> None:
    first, requests = (1_000, 10_000) if full_size else (600, 900)
    with running_teacher(model_folder, tmp_path / "log", "--log-level", "warning") as teacher:
        files = teacher.open_files()
        kept = asyncio.run(send_all(teacher, range(first)))
        memory = teacher.resident_mebibytes()
        kept |= asyncio.run(send_all(teacher, range(first, requests)))
        grown = teacher.resident_mebibytes() - memory
        logger.info("%d requests: %.0f MiB, then %+.1f MiB", requests, memory, grown)
        # The allocator is uneven by tens of MiB for some hundred requests and settles then: 30 and
        # 40 MiB were found from the 300th to the 600th, 0 and 10 from the 600th to the 900th.
        assert grown < ALLOCATOR_MEBIBYTES
        teacher.until_open_files(files)
        assert teacher.metric("mopd_requests_total") >= requests
        assert teacher.metric("mopd_requests_in_flight") == 0
        assert teacher.metric("mopd_queue_tokens") == 0
        assert teacher.stop() == 0
    assert len(kept) == requests // CHECKED_EACH
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    real_ids = sorted(AutoTokenizer.from_pretrained(model_folder).get_vocab().values())
    for number, response in kept.items():
        sent = body(number)["sequences"][0]
        prompt, completion = sent["prompt_token_ids"], sent["completion_token_ids"]
        (score,) = decode_binary(response).scores
        assert score.completion.token_ids.tolist() == completion
        for row in {0, len(completion) // 2, len(completion) - 1}:
            distribution = next_token_logprobs(model, [*prompt, *completion[:row]], real_ids)
            scored = [*score.topk.logprobs[row], score.topk.token_logprobs[row]]
            ids = [*score.topk.ids[row], completion[row]]
            np.testing.assert_allclose(scored, [distribution[i] for i in ids], atol=5e-5)
            assert len(set(ids[:-1])) == body(number)["top_k"]


def until_one_is_rejected(teacher: RunningTeacher) -> None:
    """Poll until a request was rejected; pytest's timeout ends a test that waits in vain."""
    while not teacher.metric(QUEUE_FULL):
        threading.Event().wait(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_times_the_queue_is_scored_after_retries(model_folder: Path, tmp_path: Path) -> None:
    tokens, requests = 400, 100
    queue = str(tokens * requests // 10)
    options = ("--max-queue-tokens", queue, "--max-batch-tokens", str(tokens))
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def all_at_once(teacher: RunningTeacher) -> None:
        """Send all; the first occupies the engine until another is rejected."""
        async with TeacherClient(
            "math",
            [teacher.url],
            max_concurrency=requests,
            deadline_seconds=PATIENCE_SECONDS,
            verify=0,  # a second request would be counted
        ) as client:
            sequence = SequenceRequest(
                prompt_token_ids=[1] * (tokens // 2), completion_token_ids=[2] * (tokens // 2)
            )
            tasks = [asyncio.create_task(client.score([sequence], top_k=19))]
            await asyncio.to_thread(teacher.until_metric, "mopd_requests_in_flight", 1)
            tasks += [
                asyncio.create_task(client.score([sequence], top_k=8)) for _ in range(requests - 1)
            ]
            await asyncio.to_thread(until_one_is_rejected, teacher)
            gate.write_text("open")
            scores = await asyncio.gather(*tasks)
        assert [len(score.completion) for (score,) in scores] == [tokens // 2] * requests

    with running_teacher(
        model_folder,
        tmp_path / "log",
        *options,
        program="tests.survival.unlucky_teacher",
        ENGINE_WAITS_FOR=str(gate),
    ) as teacher:
        asyncio.run(all_at_once(teacher))
        refused = teacher.metric(QUEUE_FULL)
        logger.info("%d calls, %.0f refusals on the way", requests, refused)
        assert refused > 0
        assert teacher.metric('mopd_requests_total{path="/v1/logprobs",status="200"}') == requests
