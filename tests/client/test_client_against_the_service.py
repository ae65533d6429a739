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
MESSAGES = [Message(role="user", content="3 + 4 =")]


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
    service = TeacherService.load(settings)
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


async def test_the_service_is_ready_and_satisfies_expectations(client, service):
    await client.wait_until_ready(600.0)

    manifest = await client.handshake(
        Expectation(top_k=64, temperature=0.7, candidate_ids=True, messages=True)
    )

    assert manifest == service.manifest
    with pytest.raises(ConfigError, match="at most 64, expected 65") as caught:
        await client.handshake(Expectation(top_k=65))
    assert caught.value.key == "top_k"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_scores_are_equal_on_both_sides_of_the_wire(client, service, dtype):
    sequences = [
        SequenceRequest(id="a", messages=MESSAGES, completion=" 7 的 🙂\n", finished=True),
        SequenceRequest(prompt="the quick", completion=" brown fox"),
        SequenceRequest(id="c", prompt_token_ids=[5, 6, 7], completion_token_ids=[8, 9]),
    ]
    scores = await client.score(sequences, top_k=5, temperature=0.7, logprobs_dtype=dtype)

    request = LogprobsRequest(sequences=sequences, top_k=5, temperature=0.7)
    expected = await service.score(request)
    if dtype == "float32":
        received = LogprobsResponse(
            expected.manifest_id, expected.ids, tuple(scores), expected.timings
        )
        assert_same(received, expected)
    for score, sent in zip(scores, expected.scores, strict=True):
        assert score.topk.ids.tolist() == sent.topk.ids.tolist()
        np.testing.assert_allclose(score.topk.logprobs, sent.topk.logprobs, rtol=1e-3)
        assert score.topk.token_logprobs.tolist() == sent.topk.token_logprobs.tolist()


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


async def test_candidate_ids_are_scored(client):
    sequence = SequenceRequest(
        prompt_token_ids=[5, 6], completion_token_ids=[8], candidate_ids=[[9, 7, 11]]
    )

    [score] = await client.score([sequence], top_k=2)

    assert sorted(score.topk.ids[0].tolist()) == [7, 9, 11]


async def test_a_finished_completion_has_the_teachers_tokens_and_end_of_turn(client):
    tokenizer = await client.tokenizer()
    text = "12 + 30 = 42 的"
    sequence = SequenceRequest(messages=MESSAGES, completion=text, finished=True)

    [score] = await client.score([sequence], top_k=2)

    assert score.completion.text == text.encode()
    assert score.completion.ends_turn
    assert score.completion.token_ids[:-1].tolist() == tokenizer.encoder.encode(text)
    assert score.completion.token_ids[-1] == tokenizer.table.roles.end_of_turn


async def test_the_downloaded_tokenizer_is_the_services(client):
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


async def test_a_rejected_request_raises_with_status_and_detail(client):
    too_long = SequenceRequest(prompt_token_ids=[5] * 200, completion_token_ids=[5] * 100)
    with pytest.raises(TeacherError, match=r"413: .*300 tokens") as caught:
        await client.score([too_long], top_k=1)
    assert caught.value.status == 413

    unknown = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[10**6])
    with pytest.raises(TeacherError, match=r"4\d\d: .*1000000"):
        await client.score([unknown], top_k=1)

    with pytest.raises(TeacherError, match="400: top_k: found 65"):
        await client.score([SequenceRequest(prompt="?", completion="7")], top_k=65)
    assert client.counters.retries == 0


async def test_a_wrong_api_key_raises_with_advice(service):
    async with client_of(service, api_key="wrong") as client:
        with pytest.raises(TeacherError, match="api_key") as caught:
            await client.handshake()
    assert caught.value.status == 401


def test_the_synchronous_client_scores_too(service):
    transport = httpx.ASGITransport(create_app(service, api_keys=["secret"]))
    with SyncTeacherClient("http://math", api_key="secret", transport=transport) as client:
        score = client.score(messages=[{"role": "user", "content": "?"}], completion="7")

    assert score.completion.text == b"7"
