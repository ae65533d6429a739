"""Tails of a confident teacher are exact, with both engines.

A median of 0.985 for the most likely token leaves 1e-8 and less outside 64 entries, where one minus
their float32 sum has no correct digit.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_server.engines.base import AsyncEngine, ScoringTask
from mopd_server.engines.registry import load_engine
from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.vllm_marks import needs_vllm

PROMPT, COMPLETION = 8, 200


@pytest.fixture(scope="module")
def confident(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A folder, a sequence of ids, and float64 log-probabilities ``[completion, real ids]``."""
    tokenizer = tiny_models.digit_tokenizer()
    # 32 is the smallest head of vLLM's CPU attention.
    config = {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config)).eval()
    ids = np.random.default_rng(0).integers(0, len(tokenizer), PROMPT + COMPLETION)
    rows = slice(PROMPT - 1, PROMPT + COMPLETION - 1)
    with torch.no_grad():
        logits = model.double()(torch.from_numpy(ids)[None]).logits[0, rows, : len(tokenizer)]
        low, high = 1.0, 1e6
        for _ in range(60):
            scale = (low * high) ** 0.5
            median = (scale * logits).softmax(dim=-1).amax(dim=-1).median().item()
            low, high = (scale, high) if median < 0.985 else (low, scale)
        model.float().get_output_embeddings().weight.mul_(scale)
        logprobs = model.double()(torch.from_numpy(ids)[None]).logits[0, rows, : len(tokenizer)]
        logprobs = logprobs.log_softmax(dim=-1).numpy()
    assert abs(np.median(np.exp(logprobs.max(axis=1))) - 0.985) < 1e-3
    folder = tmp_path_factory.mktemp("models") / "confident"
    return tiny_models.save(model.float(), tokenizer, folder), ids.astype(np.int32), logprobs


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_tails_of_a_confident_teacher_are_exact(
    confident: tuple[Path, np.ndarray, np.ndarray], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids, logprobs = confident
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = TeacherSettings(
        model=str(folder), engine=name, device="cpu", top_k_max=500, max_batch_tokens=64
    )
    table = ServedTokenizer.of(load_tokenizer(settings)).requests.table
    engine = load_engine(settings, table)
    try:
        assert engine.description.exact_tails
        for k in (8, 64):
            task = ScoringTask(ids[:PROMPT], ids[PROMPT:])
            if isinstance(engine, AsyncEngine):
                scores, _ = asyncio.run(engine.score(task, top_k=k, temperature=1.0))
            else:
                (scores,) = engine.score([task], top_k=k, temperature=1.0)
            expected = logprobs.copy()
            np.put_along_axis(expected, scores.ids, -np.inf, axis=1)
            tails = np.logaddexp.reduce(expected, axis=1)
            assert np.median(tails) < -10
            np.testing.assert_allclose(scores.tail_logprobs, tails, rtol=0, atol=1e-3)
            best = -np.sort(-logprobs, axis=1)[:, :k]
            np.testing.assert_allclose(scores.logprobs, best, rtol=0, atol=1e-3)
    finally:
        if isinstance(engine, AsyncEngine):
            engine.close()
