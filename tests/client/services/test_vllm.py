"""A stock vLLM server as a teacher: requests, manifest, accepted responses."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from mopd_client.score_store import ScoreStore
from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm import PROBES, VllmService
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import (
    ConfigError,
    DataError,
    InvalidResponseError,
    TeacherError,
    TeacherMismatchError,
)
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from tests import tiny_models
from tests.client.scripted_vllm import COMPLETIONS, FINGERPRINT, ScriptedVllm
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

MESSAGES = [Message(role="user", content="3 + 4 =")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The tokenizer of the served model."""
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_models.digit_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def server(folder: str) -> ScriptedVllm:
    tokenizer = load_tokenizer(folder)
    return ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size)


def client_of(server: ScriptedVllm, folder: str, **settings: Any) -> TeacherClient:
    options = {name: settings.pop(name) for name in ("model", "revision") if name in settings}
    service = VllmService(folder, **options)
    return TeacherClient(
        "math",
        settings.pop("urls", ["http://vllm"]),
        service=service,
        transport=settings.pop("transport", server.transport),
        clock=StillClock().clock,
        **{"verify": 0, **settings},
    )


def scoring_requests(server: ScriptedVllm) -> list[Any]:
    """Bodies of scoring requests; the handshake's probes are texts."""
    return [b for b in server.requests_to(COMPLETIONS) if not isinstance(b["prompt"][0], str)]


async def test_a_handshake_makes_the_manifest(server, folder):
    tokenizer = load_tokenizer(folder)
    async with client_of(server, folder, revision="step 9") as client:
        await client.wait_until_ready(600.0)
        manifest = await client.handshake(Expectation(top_k=8, messages=True))
        table = (await client.tokenizer()).table

    assert manifest.model == "org/served"
    assert (manifest.revision, manifest.engine) == ("step 9", "vllm serve")
    assert manifest.engine_version == f"0.32.0 {FINGERPRINT}"
    assert manifest.tokenizer_fingerprint == tokenizer.table.fingerprint == table.fingerprint
    assert manifest.tokenizer_size == tokenizer.table.size
    assert manifest.roles == tokenizer.table.roles
    assert (manifest.max_model_len, manifest.max_top_k) == (255, 8)
    assert not manifest.features.candidate_ids
    assert not manifest.features.temperature
    assert manifest.features.messages
    [probe] = server.requests_to(COMPLETIONS)
    assert probe["prompt"] == list(PROBES)
    assert probe["prompt_logprobs"] == 8
    assert probe["add_special_tokens"] is False
    assert server.requests[0] == ("/health", None)


async def test_scores_are_the_servers_distributions(server, folder):
    prompt, completion = [5, 6, 7], [8, 9, 10, 11]
    sequence = SequenceRequest(prompt_token_ids=prompt, completion_token_ids=completion)
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=4)
        manifest = await client.handshake()

    assert score.manifest_id == manifest.manifest_id
    assert score.completion.token_ids.tolist() == completion
    for row, token_id in enumerate(completion):
        distribution = server.row([*prompt, *completion[:row]])
        best = np.argsort(-distribution)[:4]
        assert score.topk.ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(score.topk.logprobs[row], distribution[best], rtol=1e-6)
        assert score.topk.token_logprobs[row] == np.float32(distribution[token_id])
        outside = np.delete(np.exp(distribution), best).sum()
        assert score.topk.tail_logprobs[row] == pytest.approx(np.log(outside), abs=1e-5)


async def test_a_request_has_the_ids_of_prompt_and_completion(server, folder):
    tokenizer = load_tokenizer(folder)
    sequence = SequenceRequest(
        messages=MESSAGES, completion=["7 ", ControlToken(control="<|pad|>"), "的"], finished=True
    )
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=3)

    rendered = "<|user|>3 + 4 =<|assistant|>"
    prompt = tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
    encode = tokenizer.encoder.encode
    completion = [*encode("7 "), 1, *encode("的"), 0]
    [body] = scoring_requests(server)
    assert body == {
        "model": "org/served",
        "prompt": [*prompt, *completion],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 3,
    }
    assert score.completion.token_ids.tolist() == completion
    assert score.completion.text == "7 的".encode()
    assert score.completion.ends_turn


async def test_each_sequence_is_one_request_and_scores_keep_the_order(server, folder):
    sequences = [
        SequenceRequest(id=str(n), prompt_token_ids=[5], completion_token_ids=[100 + n] * (n + 1))
        for n in range(5)
    ]
    async with client_of(server, folder) as client:
        scores = await client.score(sequences, top_k=2)

    assert [len(score.completion) for score in scores] == [1, 2, 3, 4, 5]
    assert len(scoring_requests(server)) == 5
    counters = client.counters
    assert (counters.requests, len(counters.seconds), counters.tokens_scored) == (5, 5, 15)


async def test_an_empty_completion_has_no_rows(server, folder):
    async with client_of(server, folder) as client:
        [score] = await client.score([SequenceRequest(prompt="?", completion="")], top_k=2)

    assert len(score.topk) == 0


async def test_padding_of_the_head_is_part_of_the_tail(server, folder):
    size = server.width
    server.width += 200
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8, 9, 10])
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=20)

    assert score.topk.ids.max() < size
    mass = np.exp(score.topk.logprobs.astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(
        mass + np.exp(score.topk.tail_logprobs.astype(np.float64)), 1.0, atol=1e-6
    )
    padding = np.exp(server.row([5])[size:])
    best = np.argsort(-server.row([5]))[:20]
    assert (best >= size).any()
    assert np.exp(score.topk.tail_logprobs[0]) > padding[best[best >= size] - size].sum()


async def test_a_different_tokenizer_raises_with_the_difference(server, tmp_path):
    tiny_models.whole_number_tokenizer().save_pretrained(tmp_path)
    async with client_of(server, str(tmp_path)) as client:
        with pytest.raises(TeacherMismatchError, match="The 12 quick brown foxes") as caught:
            await client.handshake()
    assert caught.value.key == "tokenizer"


async def test_a_top_k_above_the_servers_limit_raises_with_its_option(server, folder):
    async with client_of(server, folder) as client:
        with pytest.raises(ConfigError, match=r"logprobs of 64.*--max-logprobs 64") as caught:
            await client.handshake(Expectation(top_k=64))
        assert caught.value.key == "top_k"
        await client.handshake(Expectation(top_k=20))


async def test_a_second_handshake_keeps_the_largest_top_k(server, folder):
    async with client_of(server, folder) as client:
        await client.handshake(Expectation(top_k=20))
        assert (await client.handshake()).max_top_k == 20


@pytest.mark.parametrize(
    ("path", "response", "error", "key"),
    [
        ("/v1/models", httpx.Response(200, json={}), InvalidResponseError, "max_model_len"),
        (
            "/v1/models",
            httpx.Response(200, json={"data": [{"id": "x"}]}),
            InvalidResponseError,
            "max_model_len",
        ),
        ("/v1/models", httpx.Response(200, json={"data": []}), ConfigError, "model"),
        ("/v1/models", httpx.Response(200, text="<html>"), InvalidResponseError, None),
        ("/v1/models", httpx.Response(401, json={}), TeacherError, None),
        ("/version", httpx.Response(404, json={}), TeacherError, None),
        (COMPLETIONS, httpx.Response(200, json={}), InvalidResponseError, "prompt_token_ids"),
        (
            COMPLETIONS,
            httpx.Response(200, json={"choices": []}),
            InvalidResponseError,
            "prompt_token_ids",
        ),
        (
            COMPLETIONS,
            httpx.Response(500, json={"error": {"message": "CUDA out of memory"}}),
            TeacherError,
            None,
        ),
    ],
)
async def test_a_server_of_another_kind_raises(server, folder, path, response, error, key):
    server.script(path, response)
    async with client_of(server, folder) as client:
        with pytest.raises(error) as caught:
            await client.handshake()
    assert caught.value.key == key
    if isinstance(caught.value, TeacherError):
        assert caught.value.status == response.status_code


async def test_a_server_without_return_token_ids_raises(server, folder):
    server.returns_token_ids = False
    async with client_of(server, folder) as client:
        with pytest.raises(InvalidResponseError) as caught:
            await client.handshake()
    assert caught.value.key == "prompt_token_ids"


async def test_a_model_is_chosen_by_name(server, folder):
    cards = [{"id": name, "max_model_len": 64} for name in ("base", "org/served")]
    models = httpx.Response(200, json={"data": cards})
    server.script("/v1/models", models, models, models)
    for options in ({}, {"model": "other"}):
        async with client_of(server, folder, **options) as client:
            with pytest.raises(ConfigError, match="found base, org/served") as caught:
                await client.handshake()
        assert caught.value.key == "model"
    async with client_of(server, folder, model="org/served") as client:
        assert (await client.handshake()).max_model_len == 63


async def test_a_different_chat_template_logs_a_warning(server, folder, caplog):
    async with client_of(server, folder) as client:
        await client.handshake()
    assert caplog.messages == []
    server.template = ("user: ", "")
    async with client_of(server, folder) as client:
        await client.handshake()
    assert "chat template differs" in caplog.text
    caplog.clear()
    server.script("/tokenize", httpx.Response(404, json={}))  # a server without the route
    async with client_of(server, folder) as client:
        await client.handshake()
    assert caplog.messages == []


def another_fingerprint(server: ScriptedVllm) -> None:
    server.fingerprint = "vllm-0.33.0-00000000"


def no_fingerprint(server: ScriptedVllm) -> None:
    server.fingerprint = None


@pytest.mark.parametrize("change", [another_fingerprint, no_fingerprint])
async def test_a_server_that_changes_between_requests_raises(server, folder, change: Callable):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.score([sequence], top_k=2)
        change(server)
        with pytest.raises(DataError, match="has changed"):
            await client.score([sequence, sequence], top_k=2)
        with pytest.raises(DataError, match="has changed"):
            await client.handshake()
        with pytest.raises(DataError, match="has changed"):
            await client.score([sequence], top_k=2)


async def test_a_response_of_another_model_raises(server, folder):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.score([sequence], top_k=2)
        other = json.loads(server.respond(_request(scoring_requests(server)[0])).content)
        server.script(COMPLETIONS, httpx.Response(200, json={**other, "model": "org/other"}))
        with pytest.raises(DataError, match="has changed"):
            await client.score([sequence], top_k=2)


async def test_a_server_without_fingerprints_is_identified_by_its_model(server, folder):
    server.fingerprint = None
    async with client_of(server, folder) as client:
        [score] = await client.score(
            [SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])], top_k=2
        )
        assert (await client.handshake()).engine_version == "0.32.0"
    assert len(score.topk) == 1


async def test_the_revision_is_part_of_the_manifest_id(server, folder):
    manifests: list[Manifest] = []
    for revision in (None, "a", "b"):
        async with client_of(server, folder, revision=revision) as client:
            manifests.append(await client.handshake())
    assert len({manifest.manifest_id for manifest in manifests}) == 3


@pytest.mark.parametrize(
    ("sequence", "settings", "status", "key", "excerpt"),
    [
        (
            {"prompt_token_ids": [5] * 250, "completion_token_ids": [5] * 6},
            {},
            413,
            "max_model_len",
            "256 tokens, .*255",
        ),
        (
            {"prompt_token_ids": [5], "completion_token_ids": [9999]},
            {},
            400,
            "completion_token_ids",
            "9999",
        ),
        ({"prompt": "?", "completion": [{"control": "<x>"}]}, {}, 422, "completion", "'<x>'"),
        (
            {"prompt": "?", "completion_token_ids": [8], "candidate_ids": [[5]]},
            {},
            400,
            "candidate_ids",
            "mopd-teacher",
        ),
        ({"prompt": "?", "completion": "7"}, {"temperature": 0.5}, 400, "temperature", "0.5"),
    ],
)
async def test_an_unsupported_sequence_is_rejected_with_the_status_of_a_mopd_service(
    server, folder, sequence, settings, status, key, excerpt
):
    async with client_of(server, folder) as client:
        with pytest.raises(TeacherError, match=excerpt) as caught:
            await client.score([SequenceRequest(**sequence)], top_k=2, **settings)

    assert (caught.value.status, caught.value.key) == (status, key)
    assert scoring_requests(server) == []


async def test_the_longest_sequence_is_scored(server, folder):
    sequence = SequenceRequest(prompt_token_ids=[5] * 250, completion_token_ids=[5] * 5)
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=2)
    assert len(score.topk) == 5


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"index": 0},
        {"index": 0, "prompt_logprobs": None},
        {"index": 0, "prompt_logprobs": [None]},
        {"index": 0, "prompt_logprobs": [None, {"8": {"logprob": "low"}}]},
        {"index": 0, "prompt_logprobs": [None, {"9": {"logprob": -1.0}}]},
    ],
)
async def test_an_invalid_response_raises(server, folder, choice):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.handshake()
        server.script(COMPLETIONS, httpx.Response(200, json={"choices": [choice]}))
        with pytest.raises(InvalidResponseError) as caught:
            await client.score([sequence], top_k=2)

    assert (caught.value.status, caught.value.key) == (200, "prompt_logprobs")
    assert client.counters.failures == 1


async def test_after_one_failed_request_the_rest_are_cancelled(server, folder):
    pending: list[str] = []

    async def deliver(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if isinstance(body.get("prompt"), list) and body["prompt"][-1] == 8:
            pending.append("waits")
            try:
                await asyncio.Event().wait()
            finally:
                pending.append("cancelled")
        if isinstance(body.get("prompt"), list) and body["prompt"][-1] == 9:
            return httpx.Response(400, json={"error": {"message": "no"}})
        return server.respond(request)

    sequences = [
        SequenceRequest(prompt_token_ids=[5], completion_token_ids=[last]) for last in (8, 9)
    ]
    transport = httpx.MockTransport(deliver)
    async with client_of(server, folder, transport=transport) as client:
        with pytest.raises(TeacherError, match="400: no"):
            await client.score(sequences, top_k=2)
        assert pending == ["waits", "cancelled"]
        assert client.replicas[0].in_flight == 0


async def test_transient_failures_are_retried(server, folder):
    server.script(COMPLETIONS, httpx.Response(503, json={"error": {"message": "busy"}}))
    async with client_of(server, folder) as client:
        await client.handshake()
        server.script(COMPLETIONS, httpx.Response(503, json={"error": {"message": "busy"}}))
        await client.score([SequenceRequest(prompt="?", completion="7")], top_k=2)
    assert client.counters.retries == 1


async def test_scores_are_cached(server, folder, tmp_path):
    sequences = [SequenceRequest(messages=MESSAGES, completion=str(n)) for n in range(3)]
    for _ in range(2):
        cache = ScoreStore(tmp_path)
        async with client_of(server, folder, revision="a", cache=cache) as client:
            await client.score(sequences, top_k=2)
    assert len(scoring_requests(server)) == 3
    assert client.counters.cache_hits == 3


def _request(body: Any) -> httpx.Request:
    return httpx.Request("POST", f"http://vllm{COMPLETIONS}", json=body)
