"""A stock vLLM server and a mopd service return the same scores of one model."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm import VllmService
from mopd_client.teacher_client import TeacherClient
from mopd_protocol.errors import ConfigError, TeacherMismatchError
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from mopd_server.app import create_app
from tests import tiny_models
from tests.client.scripted_vllm import GENERATE, ScriptedVllm
from tests.interpreted_triton import interpreting_environment
from tests.ports import free_port
from tests.processes import interpreter, line_with
from tests.server.tiny_teachers import teacher_of
from tests.vllm_marks import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.anyio]

TOP_K = 20
MESSAGES = [Message(role="user", content="3 + 4 =")]
SEQUENCES = [
    SequenceRequest(messages=MESSAGES, completion=" 7 的 🙂\n", finished=True),
    SequenceRequest(prompt="the quick", completion=" brown fox jumps over 12 lazy dogs"),
    SequenceRequest(prompt="?", completion=["7 ", ControlToken(control="<|user|>"), "的"]),
    SequenceRequest(prompt_token_ids=[5, 6, 7], completion_token_ids=[8, 9]),
]


def model() -> Qwen3ForCausalLM:
    """A model without padding in its head, to which a stock server assigns mass."""
    tokenizer = tiny_models.digit_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the minimum of attention on a CPU
        max_position_embeddings=256,
    )
    peaked = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        peaked.lm_head.weight.mul_(20)  # peaked, as a trained model's distributions are
    return peaked


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_models.save(
        model(), tiny_models.digit_tokenizer(), tmp_path_factory.mktemp("model")
    )


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A running ``vllm serve`` of the model."""
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="module")
def scale_out_url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running ``vllm serve`` that scores chosen ids, with 32 tokens in a block of its cache."""
    pytest.importorskip("triton")
    environment = interpreting_environment(tmp_path_factory.mktemp("triton"))
    with serving(folder, "--enable-scale-out", "--block-size", "32", **environment) as address:
        yield address


@contextmanager
def serving(folder: Path, *more_options: str, **environment: str) -> Generator[str]:
    port = free_port()
    options = (
        f"--model {folder} --served-model-name tiny --host 127.0.0.1 --port {port} "
        f"--dtype float32 --enforce-eager --max-model-len 128 --max-logprobs {TOP_K}"
    )
    server = ["vllm.entrypoints.openai.api_server", *options.split(), *more_options]
    with interpreter(*server, VLLM_CPU_KVCACHE_SPACE="1", **environment) as process:
        line_with(process, "Application startup complete")
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or the pipe fills
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(timeout=120)


def stock(url: str, tokenizer: Path, **settings: Any) -> TeacherClient:
    return TeacherClient("math", [url], service=VllmService(str(tokenizer), **settings))


async def test_a_stock_server_has_the_scores_of_a_mopd_service(url, folder):
    teacher = teacher_of(model(), tiny_models.digit_tokenizer())
    transport = httpx.ASGITransport(create_app(teacher.service))
    async with (
        stock(url, folder) as vllm,
        TeacherClient("math", ["http://mopd"], transport=transport) as mopd,
    ):
        manifest = await vllm.handshake(Expectation(top_k=TOP_K, messages=True))
        expected_manifest = await mopd.handshake()
        scores = await vllm.score(SEQUENCES, top_k=TOP_K)
        expected_scores = await mopd.score(SEQUENCES, top_k=TOP_K)

    assert manifest.model == "tiny"
    assert manifest.max_model_len == 127
    assert manifest.tokenizer_fingerprint == expected_manifest.tokenizer_fingerprint
    assert manifest.chat_template_hash == expected_manifest.chat_template_hash
    assert manifest.roles == expected_manifest.roles
    for score, expected in zip(scores, expected_scores, strict=True):
        assert score.completion.token_ids.tolist() == expected.completion.token_ids.tolist()
        assert score.completion.text == expected.completion.text
        assert score.completion.marks == expected.completion.marks
        np.testing.assert_allclose(score.topk.logprobs, expected.topk.logprobs, atol=1e-5)
        np.testing.assert_allclose(
            score.topk.token_logprobs, expected.topk.token_logprobs, atol=1e-5
        )
        np.testing.assert_allclose(
            np.exp(score.topk.tail_logprobs), np.exp(expected.topk.tail_logprobs), atol=1e-5
        )


async def test_the_longest_sequence_of_the_manifest_is_scored(url, folder):
    async with stock(url, folder) as client:
        limit = (await client.handshake()).max_model_len
        sequence = SequenceRequest(prompt_token_ids=[5], completion_token_ids=[6] * (limit - 1))
        [score] = await client.score([sequence], top_k=2)
    assert len(score.topk) == limit - 1


async def test_a_stock_servers_tokenizer_limit_and_model_are_checked(url, folder, tmp_path):
    tiny_models.whole_number_tokenizer().save_pretrained(tmp_path)
    async with stock(url, tmp_path) as client:
        with pytest.raises(TeacherMismatchError):
            await client.handshake()
    async with stock(url, folder) as client:
        with pytest.raises(ConfigError, match=f"--max-logprobs {TOP_K + 1}"):
            await client.handshake(Expectation(top_k=TOP_K + 1))
    async with stock(url, folder, model="other") as client:
        with pytest.raises(ConfigError, match="found tiny, expected 'other'"):
            await client.handshake()


async def test_a_stock_server_renders_messages_like_the_client(url, folder, caplog):
    async with stock(url, folder) as client:
        await client.handshake()
    assert "chat template differs" not in caplog.text


async def test_a_stock_server_without_the_option_does_not_score_chosen_ids(url, folder):
    async with stock(url, folder) as client:
        assert not (await client.handshake()).features.candidate_ids
        with pytest.raises(ConfigError, match="--enable-scale-out") as caught:
            await client.handshake(Expectation(top_k=4, candidate_ids=True))
    assert caught.value.key == "candidate_ids"


@pytest.mark.nightly
async def test_chosen_ids_have_the_scores_of_a_mopd_service(scale_out_url, folder):
    """Twice, as the second time a part of each sequence is in the server's prefix cache."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(100, 400, 65).tolist()
    sequences = [
        SequenceRequest(
            prompt_token_ids=prompt,
            completion_token_ids=draw.integers(100, 400, 40).tolist(),
            candidate_ids=[
                draw.choice(419, size, replace=False).tolist()
                for size in draw.integers(0, TOP_K, 40)
            ],
        )
        for _ in range(2)
    ]
    teacher = teacher_of(model(), tiny_models.digit_tokenizer())
    transport = httpx.ASGITransport(create_app(teacher.service))
    service = VllmService(str(folder))
    async with (
        TeacherClient("math", [scale_out_url], service=service, verify=1) as vllm,
        TeacherClient("math", ["http://mopd"], transport=transport) as mopd,
        httpx.AsyncClient(base_url=scale_out_url) as http,
    ):
        await vllm.handshake(Expectation(top_k=TOP_K - 1, candidate_ids=True))
        expected_scores = await mopd.score(sequences, top_k=1)
        for _ in range(2):
            scores = [s for each in sequences for s in await vllm.score([each], top_k=1)]
            for score, expected in zip(scores, expected_scores, strict=True):
                width = score.topk.k
                assert score.topk.ids.tolist() == expected.topk.ids[:, :width].tolist()
                np.testing.assert_allclose(
                    score.topk.logprobs, expected.topk.logprobs[:, :width], atol=1e-5
                )
                np.testing.assert_allclose(
                    score.topk.token_logprobs, expected.topk.token_logprobs, atol=1e-5
                )
                np.testing.assert_allclose(
                    np.exp(score.topk.tail_logprobs), np.exp(expected.topk.tail_logprobs), atol=1e-5
                )
        hits = (await http.get("/metrics")).text.partition("vllm:prefix_cache_hits_total{")[2]
    assert vllm.counters.spot_checks >= 4
    assert float(hits.split()[1]) >= 64  # of the second completion's prompt


@pytest.mark.nightly
async def test_the_scripted_server_has_the_errors_of_a_stock_server(scale_out_url, folder):
    tokenizer = tiny_models.digit_tokenizer()
    scripted = ScriptedVllm(
        tokenizer.backend_tokenizer, width=len(tokenizer), model="tiny", scale_out=True
    )
    rows: dict[str, Any] = {
        "rows": [[8]],
        "width": [[8] * (TOP_K + 1)] * 2,
        "empty": [[], []],
        "none": [[8], [9, -1]],
    }
    async with httpx.AsyncClient(base_url=scale_out_url) as http:
        for name, ids in rows.items():
            sampling = {
                "max_tokens": 1,
                "prompt_logprob_token_ids": ids,
                "prompt_logprob_start": 2,
                "skip_reading_prefix_cache": True,
            }
            body = {"model": "tiny", "token_ids": [5, 6, 7, 8, 9], "sampling_params": sampling}
            actual = await http.post(GENERATE, json=body)
            expected = scripted.respond(httpx.Request("POST", f"http://x{GENERATE}", json=body))
            assert actual.status_code == expected.status_code == (200 if name == "none" else 400)
            if name != "none":
                assert actual.json()["error"]["message"] == expected.json()["error"]["message"]
