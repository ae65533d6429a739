"""Tests of the vLLM engine, started once, against transformers with the same weights."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.app import create_app
from mopd_server.engines.base import AsyncEngine, EngineCrashError, EngineTimes, ScoringTask
from mopd_server.engines.registry import load_engine
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.server.tiny_teachers import get, post, problem, scores_of
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm

if TYPE_CHECKING:  # importing vLLM takes seconds
    from mopd_server.engines.vllm.engine import VllmEngine

#: Sequences of up to 255 tokens need several steps.
STEP_TOKENS = 64
TOP_K_MAX = 500


@dataclass(frozen=True)
class Pair:
    """Both engines and their services with the same model folder."""

    vllm_engine: "VllmEngine"
    transformers_engine: TransformersEngine
    vllm: TeacherService
    transformers: TeacherService
    real_ids: np.ndarray

    def tasks(self, *lengths: tuple[int, int]) -> list[ScoringTask]:
        """Return random sequences of these lengths of prompt and completion."""
        draw = np.random.default_rng(sum(map(sum, lengths)))
        return [
            ScoringTask(
                draw.choice(self.real_ids, prompt).astype(np.int32),
                draw.choice(self.real_ids, completion).astype(np.int32),
            )
            for prompt, completion in lengths
        ]

    def score(
        self, tasks: list[ScoringTask], top_k: int
    ) -> list[tuple[TopKLogprobs, TopKLogprobs]]:
        """Return the scores of concurrent requests to vLLM, and of transformers."""

        async def by_vllm() -> list[tuple[TopKLogprobs, EngineTimes]]:
            score = self.vllm_engine.score
            return await asyncio.gather(*(score(t, top_k=top_k, temperature=1.0) for t in tasks))

        expected = self.transformers_engine.score(tasks, top_k=top_k, temperature=1.0)
        return list(zip([scores for scores, _ in asyncio.run(by_vllm())], expected, strict=True))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with heads of 32, the minimum of vLLM's CPU attention."""
    tokenizer = tiny_models.digit_tokenizer()
    config = {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    return tiny_models.save(model, tokenizer, folder)


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Pair]:
    settings = {
        "model": str(model_folder), "name": "math", "device": "cpu", "top_k_max": TOP_K_MAX,
        "max_batch_tokens": STEP_TOKENS,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        both = [TeacherSettings(engine=name, **settings) for name in ("vllm", "transformers")]
        tokenizer = ServedTokenizer.of(load_tokenizer(both[0]))
        vllm, transformers = (load_engine(each, tokenizer.requests.table) for each in both)
        assert isinstance(vllm, AsyncEngine)
        assert isinstance(transformers, TransformersEngine)
        services = (
            TeacherService(tokenizer, vllm, both[0]),
            TeacherService(tokenizer, transformers, both[1]),
        )
        for service in services:
            service.warm_up()
            assert service.ready, service.failure
        yield Pair(vllm, transformers, *services, np.flatnonzero(tokenizer.requests.table.present))
        services[0].close()


def assert_equal(scores: TopKLogprobs, expected: TopKLogprobs) -> None:
    """Compare up to rounding; ids only if rounding cannot swap two of nearly equal logprobs."""
    assert scores.ids.shape == expected.ids.shape
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(scores.token_logprobs, expected.token_logprobs, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        np.exp(scores.tail_logprobs), np.exp(expected.tail_logprobs), atol=1e-5
    )
    gaps = -np.diff(expected.logprobs, axis=1, append=-np.inf)
    separate = (gaps > 1e-4) & (np.roll(gaps, 1, axis=1) > 1e-4)
    separate[:, 0] = gaps[:, 0] > 1e-4
    separate[:, -1] = False  # the next entry is unknown
    assert separate.sum() > 0 or scores.k < 2
    np.testing.assert_array_equal(scores.ids[separate], expected.ids[separate])


def test_arrays_are_used_instead_of_lists(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("vLLM returned lists")

    monkeypatch.setattr("mopd_server.engines.vllm.engine.topk_from_lists", fail)
    for scores, expected in pair.score(pair.tasks((3, 200), (1, 9)), 4):
        assert_equal(scores, expected)


@pytest.mark.parametrize("top_k", [1, 4, 64, None])
def test_ragged_sequences_have_equal_scores(top_k: int | None, pair: Pair) -> None:
    tasks = pair.tasks((1, 1), (1, 30), (40, 3), (5, 5), (100, 154), (3, 0), (64, 64), (63, 1))
    k = len(pair.real_ids) if top_k is None else top_k
    for task, (scores, expected) in zip(tasks, pair.score(tasks, k), strict=True):
        assert len(scores) == len(task.completion_ids)
        if len(scores):
            assert_equal(scores, expected)
        assert set(scores.ids.ravel().tolist()) <= {*pair.real_ids.tolist()}


def test_full_vocabulary_has_no_tail(pair: Pair) -> None:
    ((scores, _),) = pair.score(pair.tasks((2, 20)), len(pair.real_ids))
    assert np.isneginf(scores.tail_logprobs).all()
    np.testing.assert_allclose(np.exp(scores.logprobs.astype(float)).sum(axis=1), 1, atol=1e-5)


def test_manifest_contains_the_limits_of_vllm(pair: Pair) -> None:
    manifest, other = pair.vllm.manifest, pair.transformers.manifest
    assert (manifest.engine, manifest.dtype) == ("vllm", "float32")
    assert manifest.features.temperature is False
    assert manifest.revision == other.revision
    assert manifest.logit_width == other.logit_width > len(pair.real_ids)
    assert manifest.max_model_len == other.max_model_len - 1
    assert manifest.max_top_k == len(pair.real_ids)


def test_longest_sequence_is_scored_and_a_longer_one_is_a_413(pair: Pair) -> None:
    longest = pair.vllm.manifest.max_model_len
    tasks = pair.tasks((longest - 10, 10))
    for scores, expected in pair.score(tasks, 3):
        assert_equal(scores, expected)
    ids = [int(pair.real_ids[-1])] * (longest + 1)
    sequence = {"prompt_token_ids": ids[:1], "completion_token_ids": ids[1:]}
    problem(post(create_app(pair.vllm), {"sequences": [sequence], "top_k": 1}), 413, "too_large")


SEQUENCES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "3 + 4 ="}], "completion": "7", "finished": True},
    {"prompt": "the quick", "completion": " brown fox jumps"},
    {"prompt": "def add(a, b):", "completion": "\n    return a + b\n" * 8, "finished": True},
]


def test_both_services_return_equal_responses(pair: Pair) -> None:
    responses = (
        scores_of(create_app(service), *SEQUENCES, top_k=6)
        for service in (pair.vllm, pair.transformers)
    )
    for scores, expected in zip(*responses, strict=True):
        assert scores.keys() == expected.keys()
        for name, value in expected.items():
            if "logprobs" in name:
                np.testing.assert_allclose(scores[name], value, atol=1e-4)
            else:
                assert scores[name] == value


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.5), ("top_k", TOP_K_MAX + 1)])
def test_unsupported_option_is_a_400(field: str, value: float, pair: Pair) -> None:
    body = {"sequences": SEQUENCES, "top_k": 1, field: value}
    document = problem(post(create_app(pair.vllm), body), 400, "malformed")
    assert document["detail"].startswith(field)


def test_candidates_are_requested_by_row_as_documented_by_vllm(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM supports given ids on accelerators only, so its output is computed from its manual:
    row ``i`` predicts prompt token ``prompt_logprob_start + i + 1``, and ``-1`` scores ``-inf``."""
    (plain,) = pair.tasks((5, 4))
    token = int(plain.completion_ids[1])
    candidates = [[3, 9, 40], [token], [], [7, 8]]
    rows = tuple(np.array(row, dtype=np.int32) for row in candidates)
    task = ScoringTask(plain.prompt_ids, plain.completion_ids, rows)
    ids = np.concatenate([plain.prompt_ids, plain.completion_ids])
    (full,) = pair.transformers_engine.score(
        [ScoringTask(ids[:1], ids[1:])], top_k=len(pair.real_ids), temperature=1.0
    )

    async def generate(
        sequence: ScoringTask, *, prompt_logprob_token_ids: np.ndarray, prompt_logprob_start: int
    ) -> SimpleNamespace:
        assert prompt_logprob_start + len(prompt_logprob_token_ids) == sequence.tokens - 1
        logprobs = np.full(prompt_logprob_token_ids.shape, -np.inf, dtype=np.float32)
        for (row, column), token_id in np.ndenumerate(prompt_logprob_token_ids):
            if token_id >= 0:
                # Row r of ``full`` predicts token r + 1 of the sequence.
                position = prompt_logprob_start + row
                matches = full.ids[position] == token_id
                logprobs[row, column] = full.logprobs[position][matches][0]
        return SimpleNamespace(prompt_token_id_logprobs=logprobs, metrics=None)

    assert pair.vllm.manifest.features.candidate_ids is False
    monkeypatch.setattr(pair.vllm_engine, "_generate", generate)
    ((scores, expected),) = pair.score([task], 1)
    np.testing.assert_array_equal(scores.ids, expected.ids)
    for name in ("logprobs", "token_logprobs", "tail_logprobs"):
        np.testing.assert_allclose(getattr(scores, name), getattr(expected, name), atol=1e-5)


def test_cancelled_request_is_aborted_in_vllm(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pair.vllm_engine._llm
    aborted: list[str] = []
    abort = llm.abort

    async def recorded_abort(request_id: str, **options: Any) -> None:
        aborted.append(request_id)
        await abort(request_id, **options)

    monkeypatch.setattr(llm, "abort", recorded_abort)
    body = {"prompt_token_ids": [1] * 200, "completion_token_ids": [2] * 50}
    request = LogprobsRequest.model_validate({"sequences": [body] * 20, "top_k": 400})

    async def scenario() -> None:
        cancelled = asyncio.create_task(pair.vllm.score(request))
        while not llm.get_num_unfinished_requests():
            assert not cancelled.done()
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        while llm.get_num_unfinished_requests():
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert len(aborted) > 0
    sample = pair.vllm.metrics.registry.get_sample_value
    counted = sample("mopd_cancelled_sequences_total")
    assert counted is not None
    assert counted >= len(aborted)  # some may not have reached vLLM
    assert sample("mopd_queue_sequences") == 0
    ((scores, expected),) = pair.score(pair.tasks((4, 9)), 5)  # the engine still works
    assert_equal(scores, expected)


def test_killed_engine_process_is_reported(pair: Pair) -> None:
    # The last test of this file: the engine has crashed afterwards.
    reported = threading.Event()
    causes: list[str] = []

    def callback(cause: str) -> None:
        causes.append(cause)
        reported.set()

    pair.vllm.on_engine_crash = callback
    (engine_core,) = [p for p in multiprocessing.active_children() if "EngineCore" in p.name]
    assert engine_core.pid is not None
    os.kill(engine_core.pid, signal.SIGKILL)
    assert reported.wait(timeout=600)
    assert causes == ["the vLLM process EngineCore was killed by SIGKILL"]
    assert (pair.vllm.ready, pair.vllm.failure) == (False, causes[0])
    problem(get(create_app(pair.vllm), "/readyz"), 503, "failed")
    with pytest.raises(EngineCrashError, match="SIGKILL"):
        pair.score(pair.tasks((2, 2)), top_k=1)
    assert len(causes) == 1
