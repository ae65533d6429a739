"""Second requests: altered responses contradict them, honest ones never do."""

import asyncio
import copy
import json
import random
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mopd_client.score_agreement import Agreement, KnownRow
from mopd_client.services.vllm import VllmService
from mopd_client.spot_checks import SpotChecks
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import (
    ConfigError,
    TeacherUnavailableError,
    VerificationError,
)
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message
from tests import tiny_models
from tests.client.consistent_lies import (
    CHANGES,
    RELABELLED,
    at_one_temperature,
    of_some,
    with_partners_as_candidates,
)
from tests.client.lying_proxy import LyingProxy, proxy_app, serving
from tests.client.scripted_teacher import ScriptedTeacher, network
from tests.client.scripted_vllm import COMPLETIONS, ScriptedVllm
from tests.client.still_clock import StillClock
from tests.server.tiny_teachers import FAMILIES, teacher_of

pytestmark = pytest.mark.anyio

TOP_K = 16
#: So small that only the first response is verified.
FIRST_ONLY = 1e-12


def digits(seed: int, count: int = 24) -> str:
    """Return random digits, which are one token each."""
    return "".join(map(str, np.random.default_rng(seed).integers(0, 10, count)))


def sequences(seed: int = 0, count: int = 3) -> list[SequenceRequest]:
    """Return sequences of 24 tokens; the last one has ended its turn."""
    plain = [
        SequenceRequest(prompt="the quick", completion=digits(seed * count + i))
        for i in range(count - 1)
    ]
    message = Message(role="user", content=digits(seed, 4))
    return [*plain, SequenceRequest(messages=[message], completion=digits(seed), finished=True)]


def peaked(family: str, factor: float = 30, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model with as wide a range of probabilities as a language model."""
    make_model, make_tokenizer = FAMILIES[family]
    model = make_model(make_tokenizer())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    return model.to(dtype)


@pytest.fixture(scope="module")
def teachers() -> Generator[tuple[str, LyingProxy, str]]:
    """A teacher, and a proxy in front of it."""
    teacher = teacher_of(peaked("qwen"), tiny_models.digit_tokenizer())
    with ExitStack() as stack:
        honest = stack.enter_context(serving(teacher.app))
        proxy = LyingProxy(honest, forged=True)
        yield honest, proxy, stack.enter_context(serving(proxy_app(proxy)))


@pytest.fixture
def proxy(teachers: tuple[str, LyingProxy, str]) -> LyingProxy:
    proxy = teachers[1]
    # Event loops end with their test.
    proxy.client = proxy.lie = proxy.request = None
    return proxy


async def rejection(urls: list[str], calls: int = 1, **options: Any) -> tuple[int, str | None]:
    """Return the calls until a second score contradicts the first, and the kind of request."""
    async with TeacherClient("math", urls, **{"verify": FIRST_ONLY, **options}) as client:
        for call in range(calls):
            try:
                await client.score(sequences(call), top_k=TOP_K)
            except VerificationError as error:
                return call, error.key
    return calls, None


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "power 1.3"])
async def test_a_consistent_lie_is_detected_by_the_first_request(
    teachers: tuple[str, LyingProxy, str], proxy: LyingProxy, name: str
) -> None:
    assert await rejection([teachers[2]]) == (1, None)
    proxy.lie = CHANGES[name]
    assert await rejection([teachers[2]], verify=0) == (1, None)
    assert (await rejection([teachers[2]]))[0] == 0


@pytest.mark.parametrize(
    ("change", "lie", "kind"),
    [
        # The ids of every row but the sampled ones are those of another vocabulary.
        (with_partners_as_candidates, RELABELLED, "last_token"),
        (at_one_temperature, None, "temperature"),
    ],
)
async def test_one_kind_detects_what_the_others_agree_with(
    teachers: tuple[str, LyingProxy, str], proxy: LyingProxy, change: Any, lie: Any, kind: str
) -> None:
    proxy.request, proxy.lie = change, lie
    assert await rejection([teachers[2]]) == (0, kind)


async def test_a_lie_in_some_responses_is_detected_within_the_expected_number_of_calls(
    teachers: tuple[str, LyingProxy, str], proxy: LyingProxy
) -> None:
    counts: list[int] = []
    for seed in range(4):
        # The first call makes four requests; each later sequence is verified with probability 1/2.
        proxy.lie = of_some(CHANGES["ids reversed"], 5)
        calls, _ = await rejection([teachers[2]], 20, verify=0.5, seed=seed)
        counts.append(calls)
    assert max(counts) < 20
    assert np.mean(counts) < 8


@pytest.mark.parametrize("first", [True, False])
async def test_a_lying_replica_is_detected(
    teachers: tuple[str, LyingProxy, str], proxy: LyingProxy, first: bool
) -> None:
    honest, _, url = teachers
    urls = [url, honest] if first else [honest, url]
    assert await rejection(urls) == (1, None)
    proxy.lie = CHANGES["temperature 1.3"]
    async with TeacherClient("math", urls) as client:
        with pytest.raises(VerificationError) as caught:
            await client.score(sequences(), top_k=TOP_K)
    assert honest in str(caught.value)
    assert url in str(caught.value)


async def test_the_first_response_of_each_replica_is_verified(
    teachers: tuple[str, LyingProxy, str], proxy: LyingProxy
) -> None:
    urls = [teachers[0], teachers[2]]
    async with TeacherClient("math", urls, verify=FIRST_ONLY) as client:
        for _ in range(2):
            calls = [client.score(sequences(call), top_k=TOP_K) for call in range(2)]
            await asyncio.gather(*calls)
        assert client.counters.spot_checks == 6  # three kinds


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, DTYPES, strict=True)])
async def test_honest_teachers_agree(family: str, dtype: torch.dtype) -> None:
    await require_agreement(family, dtype, calls=4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
async def test_honest_teachers_agree_in_many_calls(family: str, dtype: torch.dtype) -> None:
    await require_agreement(family, dtype, calls=60)


async def require_agreement(family: str, dtype: torch.dtype, calls: int) -> None:
    """Verify every sequence of random requests to a random model."""
    generator = random.Random(f"{family} {dtype}")
    tokenizer = FAMILIES[family][1]()
    teacher = teacher_of(peaked(family, generator.choice([1, 10, 40]), dtype), tokenizer)
    known = teacher.real_ids
    transport = httpx.ASGITransport(teacher.app)
    async with TeacherClient("math", ["http://math"], transport=transport, verify=1) as client:
        for call in range(calls):
            prompts = [generator.choices(known, k=generator.randint(1, 60)) for _ in range(2)]
            batch = [
                SequenceRequest(
                    prompt_token_ids=prompt,
                    completion_token_ids=generator.choices(known, k=generator.randint(1, 100)),
                )
                for prompt in prompts
            ]
            candidates = [generator.sample(known, generator.randint(0, 9)) for _ in range(5)]
            changes = {"completion_token_ids": known[:5], "candidate_ids": candidates}
            await client.score(
                [*batch, *sequences(call), batch[0].model_copy(update=changes)],
                top_k=generator.choice([1, 2, 16, 64]),
                temperature=generator.choice([0.015, 0.1, 0.7, 1.0, 1.0, 1.3, 5.0, 60.0]),
                logprobs_dtype=generator.choice(["float32", "float16"]),
            )
            if call == calls // 2:
                await client.tokenizer()
        counters = client.counters
    # 6 sequences a call, all but the first with one kind.
    assert counters.spot_checks >= 6 * calls
    assert counters.spot_check_tokens <= counters.tokens_scored


async def test_few_tokens_are_scored_again() -> None:
    teacher = teacher_of(peaked("qwen"), tiny_models.digit_tokenizer())
    transport = httpx.ASGITransport(teacher.app)
    share, results = 0.06, []
    for seed in (0, 0, 1):
        async with TeacherClient(
            "math", ["http://math"], transport=transport, verify=share, seed=seed
        ) as client:
            for call in range(5):
                await client.score(sequences(call, count=20), top_k=2)
            results.append(replace(client.counters, seconds=[], received_bytes=0))
    first, again, other = results
    assert first == again
    # The first response has three second requests of 24 tokens.
    assert 3 < first.spot_checks < 16
    for counters in (first, other):
        assert (counters.requests, counters.tokens_scored) == (5, 2405)
        assert counters.spot_check_tokens - 72 <= share * counters.tokens_scored
    assert first != other


async def test_the_order_of_calls_does_not_matter() -> None:
    teacher = teacher_of(peaked("qwen"), tiny_models.digit_tokenizer())

    async def tokens(order: list[int]) -> int:
        transport = httpx.ASGITransport(teacher.app)
        async with TeacherClient("a", ["http://a"], transport=transport, verify=0.2) as client:
            await client.score(sequences(99), top_k=2)
            client.counters.pop()
            for call in order:
                await client.score(sequences(call), top_k=2)
            return client.counters.spot_check_tokens

    assert await tokens([*range(8)]) == await tokens([*reversed(range(8))]) > 0


async def test_zero_turns_verification_off() -> None:
    teacher = ScriptedTeacher()  # its rows depend on the token that they predict
    transport = network(math=teacher)
    sequence = SequenceRequest(prompt="?", completion_token_ids=[70, 71])
    async with TeacherClient("math", ["http://math"], transport=transport, verify=0) as client:
        await client.score([sequence], top_k=4)
    assert len(teacher.requests_to("/v1/logprobs")) == 1
    async with TeacherClient("math", ["http://math"], transport=transport) as client:
        with pytest.raises(VerificationError):
            await client.score([sequence], top_k=4)
        # A failure does not count as verification.
        with pytest.raises(VerificationError):
            await client.score([sequence], top_k=4)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError) as caught:
            SpotChecks("math", share=share, seed=0)
        assert caught.value.key == "verify"


@pytest.mark.parametrize("status", [400, 413, 422, 503])
async def test_a_teacher_that_rejects_second_requests_is_not_believed(status: int) -> None:
    teacher = teacher_of(peaked("qwen"), tiny_models.digit_tokenizer())
    inner = httpx.ASGITransport(teacher.app)
    scored = False

    async def respond(request: httpx.Request) -> httpx.Response:
        nonlocal scored
        response = await inner.handle_async_request(request)
        if request.url.path != "/v1/logprobs":
            return response
        content, headers = await response.aread(), dict(response.headers)
        if scored:
            headers |= {"content-type": "application/json"}
            return httpx.Response(status, json={}, headers=headers)
        scored = True
        return httpx.Response(200, content=content, headers=headers)

    async with TeacherClient(
        "a", ["http://a"], transport=httpx.MockTransport(respond), clock=StillClock().clock
    ) as client:
        expected = TeacherUnavailableError if status == 503 else VerificationError
        with pytest.raises(expected):
            await client.score(sequences(), top_k=2)
        assert client.counters.failures == 1


@pytest.mark.parametrize("lies", [False, True])
async def test_a_stock_server_is_verified_by_other_last_tokens(lies: bool, tmp_path: Any) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    server = ScriptedVllm(tokenizer.backend_tokenizer, width=448)

    def respond(request: httpx.Request) -> httpx.Response:
        response = server.respond(request)
        if not lies or request.url.path != COMPLETIONS:
            return response
        document = response.json()
        prompt, [choice, *_] = json.loads(request.content)["prompt"], document["choices"]
        for token, row in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=False):
            others = [key for key in row if key != str(token)]
            values = [row[key]["logprob"] for key in others]
            for key, value in zip(others, reversed(values), strict=True):
                row[key]["logprob"] = value
        return httpx.Response(200, json=document)

    async with TeacherClient(
        "math",
        ["http://vllm"],
        service=VllmService(str(tmp_path)),
        transport=httpx.MockTransport(respond),
        verify=1,
    ) as client:
        calls = [client.score(sequences(call), top_k=8) for call in range(3)]
        if lies:
            with pytest.raises(VerificationError) as caught:
                await calls[0]
            assert caught.value.key == "last_token"
            for call in calls[1:]:
                call.close()
        else:
            for call in calls:
                await call
            assert client.counters.spot_checks == 9


def test_the_normalization_at_another_temperature_is_compared() -> None:
    """Powers of the probabilities whose rest is in the tail have the right ratios only."""
    logits = -1.5 * np.arange(50, dtype=np.float64)
    true = logits - np.logaddexp.reduce(logits)

    def row(values: np.ndarray, k: int) -> KnownRow:
        tail = float(np.log(-np.expm1(np.logaddexp.reduce(values[:k]))))
        entries = dict(enumerate(values[:k].tolist()))
        return KnownRow(entries, (0, entries[0]), tail, min(tail, entries[k - 1]))

    halved = 2 * true - np.logaddexp.reduce(2 * true)
    agreement = Agreement("float32", 1.0, 2.0)
    assert agreement.disagreement(0, row(true, 8), row(halved, 8)) is None
    assert agreement.disagreement(0, row(1.3 * true, 8), row(1.3 * halved, 8)) is not None
    assert agreement.disagreement(0, row(true, 8), row(true, 8)) is not None


def test_a_small_difference_of_all_rows_is_no_rounding() -> None:
    generator = np.random.default_rng(0)
    agreement = Agreement("bfloat16", 1.0)
    results = []
    for index in range(8):
        values = np.sort(generator.uniform(-6, -4, 8))[::-1]
        first = KnownRow(dict(enumerate(values.tolist())), (0, values[0]), -0.1, values[-1])
        second = copy.deepcopy(first)
        second.entries.update({i: first.entries[i] + (-1) ** i * 0.6 for i in range(1, 8)})
        results.append(agreement.disagreement(index, first, second))
    assert results[:7] == [None] * 7
    assert results[7] is not None
