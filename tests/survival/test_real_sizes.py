"""Requests of the sizes that users have, against the model itself: long, many, and one of each."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import TeacherScore
from tests import tiny_models
from tests.processes import interpreter, line_with
from tests.survival.running_teacher import PATIENCE_SECONDS
from tests.vllm_marks import needs_vllm

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

POSITIONS = 2**15
#: Sequences, tokens of each prompt and of each completion.
SHAPES = {
    "a step of a long task": (64, 1500, 2000),
    "a step of a short task": (256, 200, 500),
    "one long sequence": (1, 16_000, 16_000),
    "many short sequences": (512, 20, 10),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 32,768 positions, and an adapter of it that changes nothing."""
    folder = tmp_path_factory.mktemp("models") / "math"
    tokenizer = tiny_models.digit_tokenizer()
    config = tiny_models.qwen(tokenizer).config.to_dict()
    config |= {"head_dim": 32, "max_position_embeddings": POSITIONS}  # vLLM needs heads of 32
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    tiny_models.save(model, tokenizer, folder)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"])  # its second matrix is zero
    peft.get_peft_model(model, adapter).save_pretrained(folder.parent / "sums")
    return folder


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)])
def addresses(request: Any, folder: Path) -> Iterator[dict[str, list[str]]]:
    """Kind of teacher -> addresses of two replicas with adapters, and of a pool."""
    engine = ["--engine", request.param, "--device", "cpu", "--dtype", "float32", "--port", "0"]
    adapter = ["--adapter", f"sums={folder.parent / 'sums'}"]
    replica = ["serve", str(folder), "--name", "math", *engine]
    pool = ["serve", "--models", f"math={folder}", *engine]
    commands = [[*replica, *adapter], replica, pool]
    if request.param == "vllm":
        commands = commands[:1]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(interpreter("mopd_server.main", *command)) for command in commands
        ]
        urls = [line_with(server, "address").split()[1] for server in servers]
        for server in servers:
            line_with(server, "is ready")
        kinds = {"replicas": urls[:2], "adapter": [f"{urls[0]}/adapters/sums"]}
        yield kinds | ({"pool": [urls[2]]} if len(urls) > 2 else {})


@pytest.mark.parametrize("form", ["ids", "text"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_real_sizes_equal_the_model(
    folder: Path, addresses: dict[str, list[str]], shape: str, form: str
) -> None:
    count, prompt, completion = SHAPES[shape]
    digits = np.random.default_rng(0).integers(0, 10, (count, prompt + completion)).astype(str)
    texts = ["".join(each) for each in digits]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.encode(each) for each in texts]  # of a token for each digit
    sequences = [
        SequenceRequest(prompt=text[:prompt], completion=text[prompt:])
        if form == "text"
        else SequenceRequest(prompt_token_ids=ids[:prompt], completion_token_ids=ids[prompt:])
        for text, ids in zip(texts, rows, strict=True)
    ]
    kinds = addresses if form == "ids" else ["replicas"]
    for kind in kinds:
        scores = asyncio.run(_scores(addresses[kind], sequences))
        assert [len(score.completion) for score in scores] == [completion] * count, kind
        for index in {0, count // 2, count - 1}:
            expected = _logprobs(folder, rows[index], prompt)
            actual = scores[index].topk.token_logprobs
            np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=kind)


async def _scores(urls: Sequence[str], sequences: Sequence[SequenceRequest]) -> list[TeacherScore]:
    seconds = {"timeout_seconds": PATIENCE_SECONDS, "deadline_seconds": PATIENCE_SECONDS}
    async with TeacherClient("math", urls, **seconds) as client:
        scores = await client.score(sequences, top_k=64)
        assert client.counters.retries == client.counters.failures == 0
        return scores


@torch.no_grad()
def _logprobs(folder: Path, ids: Sequence[int], prompt: int) -> np.ndarray:
    """Log-probabilities of the completion's tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1, :vocabulary]
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0].numpy()
