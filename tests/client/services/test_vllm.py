"""A stock vLLM server as a teacher: what it is asked, and which of its answers are believed."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from mopd_client.score_store import ScoreStore
from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm import PROBES, OpenAIService
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.folder import read_folder_tokenizer
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from tests import tiny_models
from tests.client.scripted_vllm import COMPLETIONS, FINGERPRINT, GENERATE, ScriptedVllm
from tests.client.still_clock import StillClock

pytestmark = pytest.mark.anyio

QUESTION = [Message(role="user", content="3 + 4 =")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The tokenizer of the served model."""
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_models.digit_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def server(folder: str) -> ScriptedVllm:
    tokenizer = read_folder_tokenizer(folder)
    return ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size)


def client_of(server: ScriptedVllm, folder: str, **settings: Any) -> TeacherClient:
    named = {name: settings.pop(name) for name in ("model", "revision", "api") if name in settings}
    service = OpenAIService(folder, **named)
    return TeacherClient(
        "math",
        settings.pop("urls", ["http://vllm"]),
        service=service,
        transport=settings.pop("transport", server.transport),
        clock=StillClock().clock,
        **settings,
    )


def questions(server: ScriptedVllm) -> list[Any]:
    """Bodies of scoring requests: the handshake's probes are texts."""
    return [b for b in server.requests_to(COMPLETIONS) if not isinstance(b["prompt"][0], str)]


async def test_a_handshake_makes_the_manifest_on_this_side(server, folder):
    tokenizer = read_folder_tokenizer(folder)
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


async def test_scores_are_the_servers_distributions_row_by_row(server, folder):
    prompt, completion = [5, 6, 7], [8, 9, 10, 11]
    sequence = SequenceRequest(prompt_token_ids=prompt, completion_token_ids=completion)
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=4)
        manifest = await client.handshake()

    assert score.manifest_id == manifest.manifest_id
    assert score.completion.token_ids.tolist() == completion
    for row, token_id in enumerate(completion):
        distribution = server.row([*prompt, *completion[:row]])  # all before token ``row``
        best = np.argsort(-distribution)[:4]
        assert score.topk.ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(score.topk.logprobs[row], distribution[best], rtol=1e-6)
        assert score.topk.token_logprobs[row] == np.float32(distribution[token_id])
        outside = np.delete(np.exp(distribution), best).sum()
        assert score.topk.tail_logprobs[row] == pytest.approx(np.log(outside), abs=1e-5)


async def test_what_is_sent_are_the_ids_of_prompt_and_completion(server, folder):
    tokenizer = read_folder_tokenizer(folder)
    sequence = SequenceRequest(
        messages=QUESTION, completion=["7 ", ControlToken(control="<|pad|>"), "的"], finished=True
    )
    async with client_of(server, folder) as client:
        [score] = await client.score([sequence], top_k=3)

    rendered = "<|user|>3 + 4 =<|assistant|>"
    prompt = tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
    encode = tokenizer.encoder.encode
    completion = [*encode("7 "), 1, *encode("的"), 0]
    [asked] = questions(server)
    assert asked == {
        "model": "org/served",
        "prompt": [*prompt, *completion],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 3,
    }
    assert score.completion.token_ids.tolist() == completion
    assert score.completion.text == "7 的".encode()
    assert score.completion.ends_turn


async def test_every_sequence_is_a_question_and_answers_keep_their_order(server, folder):
    sequences = [
        SequenceRequest(id=str(n), prompt_token_ids=[5], completion_token_ids=[100 + n] * (n + 1))
        for n in range(5)
    ]
    async with client_of(server, folder) as client:
        scores = await client.score(sequences, top_k=2)

    assert [len(score.completion) for score in scores] == [1, 2, 3, 4, 5]
    assert len(questions(server)) == 5
    counters = client.counters
    assert (counters.requests, len(counters.seconds), counters.tokens_scored) == (5, 5, 15)


async def test_an_empty_completion_has_no_rows(server, folder):
    async with client_of(server, folder) as client:
        [score] = await client.score([SequenceRequest(prompt="?", completion="")], top_k=2)

    assert len(score.topk) == 0


async def test_the_padding_of_a_head_is_never_answered(server, folder):
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
    assert (best >= size).any(), "this distribution should test something"
    assert np.exp(score.topk.tail_logprobs[0]) > padding[best[best >= size] - size].sum()


async def test_another_tokenizer_is_refused_with_what_differs(server, tmp_path):
    tiny_models.whole_number_tokenizer().save_pretrained(tmp_path)
    async with client_of(server, str(tmp_path)) as client:
        with pytest.raises(DataError, match="has another tokenizer than") as told:
            await client.handshake()

    assert 'of "The 12 quick brown foxes' in str(told.value)
    assert "give the tokenizer of the served model" in str(told.value)


async def test_a_top_k_that_the_server_refuses_is_told_with_its_option(server, folder):
    async with client_of(server, folder) as client:
        with pytest.raises(ConfigError) as told:
            await client.handshake(Expectation(top_k=64))
        assert "refuses prompt_logprobs of 64: Requested prompt logprobs of 64" in str(told.value)
        assert "start it with --max-logprobs 64 or more, or lower top_k" in str(told.value)
        await client.handshake(Expectation(top_k=20))


async def test_a_second_handshake_does_not_forget_the_largest_top_k(server, folder):
    async with client_of(server, folder) as client:
        await client.handshake(Expectation(top_k=20))
        assert (await client.handshake()).max_top_k == 20


@pytest.mark.parametrize(
    ("path", "answer", "error", "message"),
    [
        ("/v1/models", httpx.Response(200, json={}), TeacherError, "lists no models with a"),
        ("/v1/models", httpx.Response(200, json={"data": [{"id": "x"}]}), TeacherError, "lists no"),
        ("/v1/models", httpx.Response(200, json={"data": []}), ConfigError, "serves nothing, exp"),
        ("/v1/models", httpx.Response(200, text="<html>"), TeacherError, "a vLLM server?"),
        ("/v1/models", httpx.Response(401, json={}), TeacherError, "401.*api_key"),
        ("/version", httpx.Response(404, json={}), TeacherError, "status 404"),
        (COMPLETIONS, httpx.Response(200, json={}), TeacherError, "answered nonsense: no choices"),
        (
            COMPLETIONS,
            httpx.Response(500, json={"error": {"message": "CUDA out of memory"}}),
            TeacherError,
            "status 500: CUDA out of memory",
        ),
    ],
)
async def test_a_server_of_another_kind_is_refused(server, folder, path, answer, error, message):
    server.script(path, answer)
    async with client_of(server, folder) as client:
        with pytest.raises(error, match=message):
            await client.handshake()


async def test_a_server_that_does_not_tell_its_tokens_is_refused(server, folder):
    server.tells_token_ids = False
    async with client_of(server, folder) as client:
        with pytest.raises(ConfigError, match="does not tell how it tokenizes"):
            await client.handshake()


async def test_a_model_is_chosen_by_name_where_several_are_served(server, folder):
    cards = [{"id": name, "max_model_len": 64} for name in ("base", "org/served")]
    models = httpx.Response(200, json={"data": cards})
    server.script("/v1/models", models, models, models)
    async with client_of(server, folder) as client:
        with pytest.raises(ConfigError, match="serves base, org/served, expected one model and no"):
            await client.handshake()
    async with client_of(server, folder, model="other") as client:
        with pytest.raises(ConfigError, match="serves base, org/served, expected 'other'; set the"):
            await client.handshake()
    async with client_of(server, folder, model="org/served") as client:
        assert (await client.handshake()).max_model_len == 63


async def test_another_chat_template_is_told_and_ours_is_used(server, folder, caplog):
    async with client_of(server, folder) as client:
        await client.handshake()
    assert caplog.messages == []
    server.template = ("user: ", "")
    async with client_of(server, folder) as client:
        await client.handshake()
    assert "renders messages with another chat template" in caplog.text
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
async def test_a_server_that_changes_in_mid_run_is_refused(server, folder, change: Callable):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.score([sequence], top_k=2)
        change(server)
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.score([sequence, sequence], top_k=2)
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.handshake()
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.score([sequence], top_k=2)


async def test_an_answer_of_another_model_is_refused(server, folder):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.score([sequence], top_k=2)
        other = json.loads(server.respond(_request(questions(server)[0])).content)
        server.script(COMPLETIONS, httpx.Response(200, json={**other, "model": "org/other"}))
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.score([sequence], top_k=2)


async def test_a_server_without_fingerprints_is_believed_by_its_name(server, folder):
    server.fingerprint = None
    async with client_of(server, folder) as client:
        [score] = await client.score(
            [SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])], top_k=2
        )
        assert (await client.handshake()).engine_version == "0.32.0"
    assert len(score.topk) == 1


async def test_two_weights_of_one_name_are_two_teachers_by_their_revision(server, folder):
    manifests: list[Manifest] = []
    for revision in (None, "a", "b"):
        async with client_of(server, folder, revision=revision) as client:
            manifests.append(await client.handshake())
    assert len({manifest.manifest_id for manifest in manifests}) == 3


@pytest.mark.parametrize(
    ("sequence", "settings", "status", "message"),
    [
        ({"prompt_token_ids": [5] * 250, "completion_token_ids": [5] * 6}, {}, 413, "are 256 tok"),
        ({"prompt_token_ids": [5], "completion_token_ids": [9999]}, {}, 422, "token id 9999 has"),
        ({"prompt_token_ids": [], "completion": "7"}, {}, 400, "the prompt has no tokens"),
        ({"prompt": "?", "completion": [{"control": "<x>"}]}, {}, 422, "no control token '<x>'"),
        ({"prompt": "?", "completion": "\ud83d"}, {}, 422, "cannot be asked: .*surrogates"),
        (
            {"prompt": "?", "completion_token_ids": [8, 0], "finished": True},
            {},
            400,
            "already ends with ending token 0",
        ),
        (
            {"prompt": "?", "completion_token_ids": [8], "candidate_ids": [[5]]},
            {},
            400,
            "cannot score candidate_ids; serve it with mopd-teacher",
        ),
        ({"prompt": "?", "completion": "7"}, {"temperature": 0.5}, 400, "cannot score temperature"),
    ],
)
async def test_what_cannot_be_asked_is_refused_as_a_service_would(
    server, folder, sequence, settings, status, message
):
    async with client_of(server, folder) as client:
        with pytest.raises(TeacherError, match=message) as told:
            await client.score([SequenceRequest(**sequence)], top_k=2, **settings)

    assert told.value.status == status
    assert questions(server) == []


async def test_the_longest_sequence_that_fits_is_asked(server, folder):
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
async def test_an_answer_that_cannot_be_read_is_refused(server, folder, choice):
    sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[8])
    async with client_of(server, folder) as client:
        await client.handshake()
        server.script(COMPLETIONS, httpx.Response(200, json={"choices": [choice]}))
        with pytest.raises(TeacherError, match="teacher 'math' answered nonsense") as told:
            await client.score([sequence], top_k=2)

    assert told.value.status == 200
    assert client.counters.failures == 1


async def test_when_one_question_fails_the_others_are_cancelled(server, folder):
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


async def test_passing_failures_are_tried_again(server, folder):
    server.script(COMPLETIONS, httpx.Response(503, json={"error": {"message": "busy"}}))
    async with client_of(server, folder) as client:
        await client.handshake()
        server.script(COMPLETIONS, httpx.Response(503, json={"error": {"message": "busy"}}))
        await client.score([SequenceRequest(prompt="?", completion="7")], top_k=2)
    assert client.counters.retries == 1


async def test_scores_are_cached_like_those_of_any_teacher(server, folder, tmp_path):
    sequences = [SequenceRequest(messages=QUESTION, completion=str(n)) for n in range(3)]
    for _ in range(2):
        cache = ScoreStore(tmp_path)
        async with client_of(server, folder, revision="a", cache=cache) as client:
            await client.score(sequences, top_k=2)
    assert len(questions(server)) == 3
    assert client.counters.cache_hits == 3


def _request(body: Any) -> httpx.Request:
    return httpx.Request("POST", f"http://vllm{COMPLETIONS}", json=body)


SEQUENCE = SequenceRequest(prompt_token_ids=[5, 6, 7], completion_token_ids=[8, 9, 10, 11])


async def test_a_server_that_has_opened_it_is_asked_token_in_token_out(server, folder):
    async with client_of(server, folder) as client:
        [expected] = await client.score([SEQUENCE], top_k=4)
        assert client.path == COMPLETIONS
    server.scale_out = True
    before = len(server.requests_to(COMPLETIONS))
    async with client_of(server, folder) as client:
        manifest = await client.handshake(Expectation(top_k=4))
        [found] = await client.score([SEQUENCE], top_k=4)
        assert client.path == GENERATE

    assert server.requests_to(GENERATE)[-1] == {
        "model": "org/served",
        "token_ids": [5, 6, 7, 8, 9, 10, 11],
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 4,
            "detokenize": False,
        },
    }
    assert len(server.requests_to(COMPLETIONS)) == before + 1  # the handshake's probes
    assert found.manifest_id == expected.manifest_id == manifest.manifest_id
    np.testing.assert_array_equal(found.topk.ids, expected.topk.ids)
    np.testing.assert_array_equal(found.topk.logprobs, expected.topk.logprobs)
    np.testing.assert_array_equal(found.topk.token_logprobs, expected.topk.token_logprobs)
    np.testing.assert_array_equal(found.topk.tail_logprobs, expected.topk.tail_logprobs)


async def test_completions_alone_never_tries_the_other_route(server, folder):
    server.scale_out = True
    async with client_of(server, folder, api="completions") as client:
        await client.score([SEQUENCE], top_k=4)

    assert server.requests_to(GENERATE) == []
    assert len(questions(server)) == 1


NO_PROMPT_LOGPROBS = {"model": "org/served", "choices": [{"index": 0}]}
OF_ANOTHER_MODEL = {"model": "org/other", "prompt_logprobs": [None] * 25}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(403, json={"error": {"message": "Scale-out endpoints are disabled."}}),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(405, json={"detail": "Method Not Allowed"}),
        httpx.Response(501, json={}),
        httpx.Response(200, json=NO_PROMPT_LOGPROBS),
        httpx.Response(200, json=OF_ANOTHER_MODEL),
    ],
)
async def test_a_route_that_is_not_usable_is_not_used_and_told_where_it_was_wanted(
    server, folder, answer
):
    server.scale_out = True
    server.script(GENERATE, answer, answer)
    async with client_of(server, folder) as client:
        await client.score([SEQUENCE], top_k=4)
        assert client.path == COMPLETIONS
    async with client_of(server, folder, api="generate") as client:
        with pytest.raises(ConfigError, match="--enable-scale-out, or set api to auto"):
            await client.handshake()

    assert len(questions(server)) == 1


async def test_one_replica_without_the_route_is_enough_for_completions(server, folder):
    def deliver(request: httpx.Request) -> httpx.Response:
        server.scale_out = request.url.host == "open"
        return server.respond(request)

    transport = httpx.MockTransport(deliver)
    urls = ["http://open", "http://closed"]
    async with client_of(server, folder, transport=transport, urls=urls) as client:
        await client.score([SEQUENCE] * 4, top_k=4)
        assert client.path == COMPLETIONS
    assert len(questions(server)) == 4


async def test_a_server_that_comes_back_without_the_route_is_asked_through_the_other(
    server, folder
):
    server.scale_out = True
    async with client_of(server, folder) as client:
        [before] = await client.score([SEQUENCE], top_k=4)
        server.scale_out = False
        [after] = await client.score([SEQUENCE], top_k=4)
        assert client.path == COMPLETIONS
        np.testing.assert_array_equal(after.topk.logprobs, before.topk.logprobs)
        another_fingerprint(server)  # which only this route tells
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.score([SEQUENCE], top_k=4)
    server.scale_out = True
    async with client_of(server, folder, api="generate") as client:
        await client.handshake()
        server.scale_out = False
        with pytest.raises(TeacherError, match="status 403: Scale-out endpoints are disabled"):
            await client.score([SEQUENCE], top_k=4)


async def test_an_answer_of_another_model_is_refused_token_in_token_out_too(server, folder):
    server.scale_out = True
    async with client_of(server, folder) as client:
        await client.score([SEQUENCE], top_k=4)
        [_, asked] = server.requests_to(GENERATE)
        answer = server.respond(httpx.Request("POST", f"http://vllm{GENERATE}", json=asked))
        other = {**json.loads(answer.content), "model": "org/other"}
        server.script(GENERATE, httpx.Response(200, json=other))
        with pytest.raises(DataError, match="teacher 'math' has changed"):
            await client.score([SEQUENCE], top_k=4)
