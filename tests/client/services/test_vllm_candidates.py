"""Chosen ids on a stock vLLM server: detection, requests, values, invalid responses."""

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm import VllmService
from mopd_client.services.vllm_candidates import MATRIX, scored_ids, topk_of_matrix
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import (
    ConfigError,
    DataError,
    InvalidResponseError,
    TeacherError,
    TeacherUnavailableError,
    VerificationError,
)
from mopd_protocol.requests import SequenceRequest
from tests import tiny_models
from tests.client.scripted_vllm import BLOCK, GENERATE, ScriptedVllm, encoded
from tests.client.still_clock import StillClock
from tests.cookbook.stock_server import listening
from tests.reference.teacher_scores import completion_logprobs, tail_logprob

pytestmark = pytest.mark.anyio

IDS = "prompt_logprob_token_ids"
PROMPT, COMPLETION = [5, 6, 7], [8, 9, 10, 11]
CANDIDATES = [[8, 30, 12], [300, 9], [], [40, 41, 42, 43]]
SEQUENCE = SequenceRequest(
    prompt_token_ids=PROMPT, completion_token_ids=COMPLETION, candidate_ids=CANDIDATES
)
NEEDED = Expectation(top_k=4, candidate_ids=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the served model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_models.digit_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> ScriptedVllm:
    tokenizer = load_tokenizer(str(folder))
    return ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size, scale_out=True)


def client_of(server: ScriptedVllm, folder: Path, **settings: Any) -> TeacherClient:
    transport = settings.pop("transport", server.transport)
    return TeacherClient(
        "math",
        ["http://vllm"],
        service=VllmService(str(folder)),
        transport=transport,
        clock=StillClock().clock,
        **{"verify": 0, **settings},
    )


def scoring_requests(server: ScriptedVllm) -> list[Any]:
    """Bodies of scoring requests, without the handshake's."""
    return server.requests_to(GENERATE)[1:]


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose head has a row for each token only."""
    return tiny_models.qwen(tiny_models.digit_tokenizer()).eval()


@pytest.fixture
def url(server: ScriptedVllm, model: Any) -> Iterator[str]:
    """Address of a server with the model's distributions."""
    size = server.width

    def distribution(before: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([list(before)])).logits[0, -1, :size]
        return logits.log_softmax(-1).numpy()

    server.distribution = distribution
    with listening(server) as address:
        yield address


async def test_chosen_ids_have_the_models_log_probabilities(server, url, folder, model):
    tokenizer = load_tokenizer(str(folder))
    async with TeacherClient("math", [url], service=VllmService(str(folder)), verify=1) as client:
        manifest = await client.handshake(NEEDED)
        [score] = await client.score([SEQUENCE], top_k=4)
        assert client.counters.spot_checks > 0

    assert manifest.features.candidate_ids
    assert score.manifest_id == manifest.manifest_id
    assert score.completion.token_ids.tolist() == COMPLETION
    real_ids = range(tokenizer.table.size)
    rows = completion_logprobs(model, PROMPT, COMPLETION, real_ids)
    for row, (expected, chosen) in enumerate(zip(rows, CANDIDATES, strict=True)):
        ranked = sorted(chosen, key=lambda token_id: -expected[token_id])
        assert score.topk.ids[row].tolist() == ranked + [-1] * (4 - len(chosen))
        values = [expected[token_id] for token_id in ranked]
        np.testing.assert_allclose(score.topk.logprobs[row, : len(chosen)], values, atol=1e-5)
        assert score.topk.token_logprobs[row] == pytest.approx(expected[COMPLETION[row]], abs=1e-5)
        outside = math.exp(tail_logprob(expected, chosen))
        assert math.exp(score.topk.tail_logprobs[row]) == pytest.approx(outside, abs=1e-5)


async def test_a_request_has_the_rows_of_the_completion_only(server, folder):
    async with client_of(server, folder) as client:
        await client.score([SEQUENCE], top_k=4)

    [body] = scoring_requests(server)
    assert body == {
        "model": "org/served",
        "token_ids": [*PROMPT, *COMPLETION],
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": [
                [8, 8, 30, 12, -1],
                [9, 300, 9, -1, -1],
                [10, -1, -1, -1, -1],
                [11, 40, 41, 42, 43],
            ],
            "prompt_logprob_start": 2,
            "skip_reading_prefix_cache": False,
        },
    }


async def test_prompts_are_read_from_the_servers_cache_and_completions_are_not(server, folder):
    prompt = [20] * (2 * BLOCK + 1)  # the last token's position is computed: it predicts a row
    sequences = [
        SequenceRequest(
            prompt_token_ids=prompt,
            completion_token_ids=[30 + n] * BLOCK,
            candidate_ids=[[40, 41]] * BLOCK,
        )
        for n in range(2)
    ]
    async with client_of(server, folder) as client:
        first = [await client.score([each], top_k=2) for each in sequences]
        again = [await client.score([each], top_k=2) for each in sequences]

    skipped = [r["sampling_params"]["skip_reading_prefix_cache"] for r in scoring_requests(server)]
    assert skipped == [False, False, False, True, False, True]
    for [left], [right] in zip(first, again, strict=True):
        np.testing.assert_array_equal(left.topk.logprobs, right.topk.logprobs)


async def test_an_empty_completion_has_no_rows(server, folder):
    empty = SequenceRequest(prompt="?", completion="", candidate_ids=[])
    async with client_of(server, folder) as client:
        [score] = await client.score([empty], top_k=2)
    assert len(score.topk) == 0


def disabled(server: ScriptedVllm) -> None:
    server.scale_out = False


def first_runner(server: ScriptedVllm) -> None:
    server.v2_runner = False


def narrow(server: ScriptedVllm) -> None:
    server.max_logprobs = 4  # enough for the teacher's top-k, not for the token in addition


def without_the_route(server: ScriptedVllm) -> None:
    server.script(GENERATE, httpx.Response(404, json={"detail": "Not Found"}))


def without_the_field(server: ScriptedVllm) -> None:
    server.script(GENERATE, httpx.Response(200, json={"model": "org/served", "choices": []}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (disabled, "--enable-scale-out"),
        (first_runner, "VLLM_USE_V2_MODEL_RUNNER=1"),
        (narrow, "--max-logprobs) to at least 5"),
        (without_the_route, "Not Found"),
        (without_the_field, MATRIX),
    ],
)
async def test_a_server_that_does_not_score_chosen_ids_is_refused(
    server: ScriptedVllm, folder: Path, change: Callable[[ScriptedVllm], None], reason: str
) -> None:
    change(server)
    async with client_of(server, folder) as client:
        with pytest.raises(ConfigError) as caught:
            await client.handshake(NEEDED)
    assert caught.value.key == "candidate_ids"
    assert "found vLLM 0.32.0" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("change", [disabled, first_runner, without_the_route, without_the_field])
async def test_a_server_without_chosen_ids_returns_its_top_k(server, folder, change):
    change(server)
    plain = SEQUENCE.model_copy(update={"candidate_ids": None})
    async with client_of(server, folder) as client:
        manifest = await client.handshake(Expectation(top_k=4))
        [score] = await client.score([plain], top_k=4)
        with pytest.raises(TeacherError) as caught:
            await client.score([SEQUENCE], top_k=4)
    assert not manifest.features.candidate_ids
    assert score.topk.k == 4
    assert (caught.value.status, caught.value.key) == (400, "candidate_ids")
    assert scoring_requests(server) == []


async def test_a_limit_below_the_top_k_and_the_token_matters_for_chosen_ids_only(server, folder):
    narrow(server)
    async with client_of(server, folder) as client:
        assert (await client.handshake(Expectation(top_k=4))).features.candidate_ids


async def test_a_failure_during_detection_is_not_taken_for_a_missing_route(server, folder):
    def respond(request: httpx.Request) -> httpx.Response:
        is_probe = request.url.path == GENERATE
        return httpx.Response(503, json={}) if is_probe else server.respond(request)

    async with client_of(server, folder, transport=httpx.MockTransport(respond)) as client:
        with pytest.raises(TeacherUnavailableError):
            await client.handshake()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"candidate_ids": [[99_999], [], [], []]}, 400),  # outside the vocabulary
        ({"candidate_ids": CANDIDATES[:3]}, 400),  # a row is missing
        ({"candidate_ids": [[*range(30, 51)], [], [], []]}, 400),  # the server's limit is 20
    ],
)
async def test_invalid_candidates_are_rejected(server, folder, changes, status):
    async with client_of(server, folder) as client:
        with pytest.raises(TeacherError) as caught:
            await client.score([SEQUENCE.model_copy(update=changes)], top_k=4)
    assert caught.value.status == status


async def test_a_response_of_another_model_raises(server, folder):
    async with client_of(server, folder) as client:
        await client.score([SEQUENCE], top_k=4)
        request = httpx.Request("POST", f"http://vllm{GENERATE}", json=scoring_requests(server)[0])
        document = json.loads(server.respond(request).content)
        other = httpx.Response(200, json={**document, "model": "org/other"})
        server.script(GENERATE, other)
        with pytest.raises(DataError, match="has changed"):
            await client.score([SEQUENCE], top_k=4)


VALID = np.full((4, 5), -1.0, dtype=np.float32)
NOT_A_NUMBER = np.where(np.eye(4, 5) > 0, np.float32(np.nan), VALID)


@pytest.mark.parametrize(
    "matrix",
    [
        None,
        17,
        "not base64!",
        base64.b64encode(b"no array").decode(),
        encoded(VALID)[:-8],
        encoded(VALID[:3]),
        encoded(VALID.astype(np.float64)),
        encoded(np.asfortranarray(VALID)),
        encoded(NOT_A_NUMBER),
        encoded(VALID + 3),  # logits, or another field
        encoded(VALID),  # a probability of padding
    ],
    ids=[
        *("null", "number", "text", "other bytes", "truncated", "rows", "precision", "order"),
        *("NaN", "logits", "padding"),
    ],
)
def test_an_invalid_matrix_raises(matrix: Any) -> None:
    ids = scored_ids(np.int32(COMPLETION), [np.int32(row) for row in CANDIDATES])
    with pytest.raises(DataError):
        topk_of_matrix(matrix, ids, all_ids=420)


async def test_a_response_without_a_matrix_raises(server, folder):
    async with client_of(server, folder) as client:
        await client.handshake()
        response = {"model": server.model, MATRIX: None}
        server.script(GENERATE, *[httpx.Response(200, json=response) for _ in range(2)])
        with pytest.raises(InvalidResponseError) as caught:
            await client.score([SEQUENCE], top_k=4)
    assert (caught.value.status, caught.value.key) == (200, MATRIX)


async def test_exchanged_values_contradict_a_second_request(server, folder):

    def respond(request: httpx.Request) -> httpx.Response:
        response = server.respond(request)
        if request.url.path != GENERATE or len(json.loads(request.content)["token_ids"]) > 8:
            return response
        raw = base64.b64decode(response.json()[MATRIX])
        shape = np.array(json.loads(request.content)["sampling_params"][IDS]).shape
        values = np.frombuffer(raw[128:], np.float32).reshape(shape).copy()
        values[:, 1:] = np.roll(values[:, 1:], 1, axis=1)
        return httpx.Response(200, json={**response.json(), MATRIX: encoded(values)})

    chosen = [[30, 31, 32, 33]] * 4
    sequence = SEQUENCE.model_copy(update={"candidate_ids": chosen})
    transport = httpx.MockTransport(respond)
    async with client_of(server, folder, transport=transport, verify=1) as client:
        await client.handshake(NEEDED)
        with pytest.raises(VerificationError):
            await client.score([sequence], top_k=4)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 5))
def test_rows_are_the_sorted_values_of_the_matrix(seed: int, rows: int, widest: int) -> None:
    draw = np.random.default_rng(seed)
    size = 12
    own = draw.integers(0, size, rows).astype(np.int32)
    chosen = [
        draw.choice(size, draw.integers(0, widest + 1), replace=False).astype(np.int32)
        for _ in range(rows)
    ]
    logprobs = np.log(draw.dirichlet(np.full(size, 0.5), rows) + 1e-30).astype(np.float32)
    logprobs[draw.random(logprobs.shape) < 0.2] = -np.inf
    ids = scored_ids(own, chosen)
    matrix = np.take_along_axis(logprobs, np.maximum(ids, 0), axis=1)
    matrix[ids < 0] = -np.inf

    topk = topk_of_matrix(encoded(matrix), ids, all_ids=size)

    for row, candidates in enumerate(chosen):
        expected = {int(t): logprobs[row, t] for t in candidates if logprobs[row, t] > -np.inf}
        present = topk.ids[row] >= 0
        actual = dict(
            zip(topk.ids[row][present].tolist(), topk.logprobs[row][present], strict=True)
        )
        assert actual == expected
        assert topk.token_logprobs[row] == logprobs[row, own[row]]
        outside = 1.0 - math.fsum(math.exp(value) for value in expected.values())
        assert math.exp(topk.tail_logprobs[row]) == pytest.approx(max(outside, 0.0), abs=1e-6)
