"""The real client against the real service in one process: no ports, no patches."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd_client.services.expectation import Expectation
from mopd_client.sync import SyncTeacherClient
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError, TeacherError
from mopd_protocol.requests import ControlToken, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import Message
from mopd_server.app import create_app
from mopd_server.scoring.loading import load_service
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.protocol.wire_values import assert_same

pytestmark = pytest.mark.anyio

FAMILIES = {
    "digit qwen": (tiny_models.digit_tokenizer, tiny_models.qwen),
    "sentencepiece llama": (tiny_models.sentencepiece_tokenizer, tiny_models.llama),
    "whole number neox": (tiny_models.whole_number_tokenizer, tiny_models.gpt_neox),
}
QUESTION = [Message(role="user", content="3 + 4 =")]


@pytest.fixture(scope="module", params=FAMILIES)
def settings(request, tmp_path_factory) -> TeacherSettings:
    make_tokenizer, make_model = FAMILIES[request.param]
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("teacher")
    tiny_models.save(make_model(tokenizer), tokenizer, folder)
    return TeacherSettings(
        model=str(folder), name="math", dtype="float32", device="cpu", top_k_max=64
    )


@pytest.fixture(scope="module")
def service(settings: TeacherSettings) -> TeacherService:
    service = load_service(settings)
    service.warm_up()
    return service


@pytest.fixture
async def client(service: TeacherService) -> AsyncIterator[TeacherClient]:
    async with client_of(service) as client:
        yield client


def client_of(service: TeacherService, **settings: Any) -> TeacherClient:
    app = create_app(service, api_keys=["secret"])
    return TeacherClient(
        "math",
        ["http://math"],
        transport=httpx.ASGITransport(app),
        **{"api_key": "secret", **settings},
    )


async def test_the_service_is_ready_and_fits_the_run(client, service):
    await client.wait_until_ready(600.0)

    manifest = await client.handshake(
        Expectation(top_k=64, temperature=0.7, candidate_ids=True, messages=True)
    )

    assert manifest == service.manifest
    with pytest.raises(ConfigError, match="serves a top_k of at most 64, expected 65"):
        await client.handshake(Expectation(top_k=65))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_scores_cross_the_wire_as_the_service_made_them(client, service, dtype):
    sequences = [
        SequenceRequest(id="a", messages=QUESTION, completion=" 7 的 🙂\n", finished=True),
        SequenceRequest(prompt="the quick", completion=" brown fox"),
        SequenceRequest(id="c", prompt_token_ids=[5, 6, 7], completion_token_ids=[8, 9]),
    ]
    scores = await client.score(sequences, top_k=5, temperature=0.7, logprobs_dtype=dtype)

    asked = LogprobsRequest(sequences=sequences, top_k=5, temperature=0.7)
    made = await service.score(asked)
    if dtype == "float32":
        received = LogprobsResponse(made.manifest_id, made.ids, tuple(scores), made.timings)
        assert_same(received, made)
    for ours, theirs in zip(scores, made.scores, strict=True):
        assert ours.topk.ids.tolist() == theirs.topk.ids.tolist()
        np.testing.assert_allclose(ours.topk.logprobs, theirs.topk.logprobs, rtol=1e-3)
        assert ours.topk.token_logprobs.tolist() == theirs.topk.token_logprobs.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_scores_are_the_models_distributions(client, settings, temperature):
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    table = (await client.tokenizer()).table
    prompt, completion = [5, 6, 7], [8, 9, 10]
    sequence = SequenceRequest(prompt_token_ids=prompt, completion_token_ids=completion)

    [score] = await client.score([sequence], top_k=4, temperature=temperature)

    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, :, : table.size].double()
    # Row r predicts completion token r: the model's output at the token before it.
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1).numpy()
    expected = np.sort(rows, axis=1)[:, ::-1][:, :4]
    np.testing.assert_allclose(score.topk.logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(score.topk.token_logprobs, rows[np.arange(3), completion], atol=1e-5)


async def test_chosen_candidates_are_scored(client):
    sequence = SequenceRequest(
        prompt_token_ids=[5, 6], completion_token_ids=[8], candidate_ids=[[9, 7, 11]]
    )

    [score] = await client.score([sequence], top_k=2)

    assert sorted(score.topk.ids[0].tolist()) == [7, 9, 11]


async def test_a_finished_answer_is_spelled_and_ended_in_the_teachers_tokens(client):
    tokenizer = await client.tokenizer()
    text = "12 + 30 = 42 的"
    sequence = SequenceRequest(messages=QUESTION, completion=text, finished=True)

    [score] = await client.score([sequence], top_k=2)

    assert score.completion.text == text.encode()
    assert score.completion.ends_turn
    assert score.completion.token_ids[:-1].tolist() == tokenizer.encoder.encode(text)
    assert score.completion.token_ids[-1] == tokenizer.table.roles.end_of_turn


async def test_the_fetched_tokenizer_spells_what_the_service_says(client):
    table = (await client.tokenizer()).table
    sequence = SequenceRequest(
        prompt="?", completion=["a ", ControlToken(control="<|user|>"), " <|user|>"]
    )

    [score] = await client.score([sequence], top_k=1)

    again = table.sequence(score.completion.token_ids)
    assert again.text == score.completion.text == b"a  <|user|>"
    assert again.byte_ends.tolist() == score.completion.byte_ends.tolist()
    assert again.marks == score.completion.marks
    assert list(score.completion.marks.values()) == ["<|user|>"]


async def test_refusals_of_the_service_arrive_as_one_sentence(client):
    too_long = SequenceRequest(prompt_token_ids=[5] * 200, completion_token_ids=[5] * 100)
    with pytest.raises(TeacherError, match=r"teacher 'math' answered 413: .*300 tokens") as told:
        await client.score([too_long], top_k=1)
    assert told.value.status == 413

    unknown = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[10**6])
    with pytest.raises(TeacherError, match=r"teacher 'math' answered 4.*1000000"):
        await client.score([unknown], top_k=1)

    with pytest.raises(TeacherError, match="teacher 'math' answered 400: top_k: found 65"):
        await client.score([SequenceRequest(prompt="?", completion="7")], top_k=65)
    assert client.counters.retries == 0


async def test_a_wrong_key_is_refused_with_advice(service):
    async with client_of(service, api_key="wrong") as client:
        with pytest.raises(TeacherError, match=r"'math' answered 401: .*is its api_key right"):
            await client.handshake()


def test_the_synchronous_client_asks_the_same_service(service):
    with SyncTeacherClient(client_of(service)) as client:
        [score] = client.score([SequenceRequest(prompt="?", completion="7")], top_k=1)

    assert score.completion.text == b"7"
