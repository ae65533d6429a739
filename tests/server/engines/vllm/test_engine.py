"""Tests of the vLLM engine, started once, against transformers with the same weights."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import pytest
import torch
from prometheus_client import REGISTRY
from scipy.special import log_softmax
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mopd_protocol.errors import ConfigError
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.app import create_app
from mopd_server.engines.base import AsyncEngine, EngineCrashError, EngineTimes, ScoringTask
from mopd_server.engines.registry import load_engine
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.engines.vllm.processes.idle_waiting import wait_without_spinning
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.reference.flat_logprobs_by_hand import Flat
from tests.server.compatible.expected_rows import send
from tests.server.tiny_teachers import get, post, problem, scores_of
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm

if TYPE_CHECKING:  # importing vLLM takes seconds
    from vllm.outputs import RequestOutput

    from mopd_server.engines.vllm.engine import VllmEngine

#: Sequences of up to 255 tokens need several steps.
STEP_TOKENS = 256
BLOCK = 32
TOP_K_MAX = 500


@dataclass(frozen=True)
class Pair:
    """Both engines and their services with the same model folder."""

    vllm_engine: "VllmEngine"
    transformers_engine: TransformersEngine
    vllm: TeacherService
    transformers: TeacherService
    real_ids: np.ndarray
    folder: Path

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
        self, tasks: list[ScoringTask], top_k: int, temperature: float = 1.0
    ) -> list[tuple[TopKLogprobs, TopKLogprobs]]:
        """Return the scores of concurrent requests to vLLM, and of transformers."""
        size: Any = {"top_k": top_k, "temperature": temperature}

        async def by_vllm() -> list[tuple[TopKLogprobs, EngineTimes]]:
            return await asyncio.gather(*(self.vllm_engine.score(t, **size) for t in tasks))

        expected = self.transformers_engine.score(tasks, **size)
        return list(zip([scores for scores, _ in asyncio.run(by_vllm())], expected, strict=True))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with heads of 32, the minimum of vLLM's CPU attention.

    Rows of the head without a token, in gaps and behind the tokenizer, have the largest logits.
    """
    tokenizer = tiny_models.tokenizer_with_gaps()
    config = {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(config))
    present = [*tokenizer.get_vocab().values()]
    without = np.setdiff1d(np.arange(model.config.vocab_size), present)
    with torch.no_grad():
        model.lm_head.weight[without] *= 20
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    return tiny_models.save(model, tokenizer, folder)


def adapter_options(base: Path) -> tuple[str, ...]:
    """Return options for LoRA adapters of different ranks, saved next to ``base``."""
    options: list[str] = []
    for rank in (2, 9):
        model = AutoModelForCausalLM.from_pretrained(base)
        config = peft.LoraConfig(
            r=rank, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        folder = base.parent / f"rank-{rank}"
        peft.get_peft_model(model, config).save_pretrained(folder)
        options.append(f"rank-{rank}={folder}")
    return tuple(options)


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Pair]:
    settings: dict[str, Any] = {
        "model": str(model_folder), "name": "math", "device": "cpu", "top_k_max": TOP_K_MAX,
        "max_batch_tokens": STEP_TOKENS, "adapter": adapter_options(model_folder),
    }  # fmt: skip
    # Sequences in turns, and a cache for few of them, so that some are preempted.
    cache = ("long_prefill_token_threshold=48", f"block_size={BLOCK}", "num_gpu_blocks_override=26")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        both = [
            TeacherSettings(engine="vllm", vllm_arg=cache, **settings),
            TeacherSettings(engine="transformers", **settings),
        ]
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
        real_ids = np.flatnonzero(tokenizer.requests.table.present)
        yield Pair(vllm, transformers, *services, real_ids, model_folder)
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


@pytest.fixture
def outputs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> "list[RequestOutput]":
    """Outputs of vLLM during a test."""
    recorded: list[RequestOutput] = []
    generate = pair.vllm_engine._generate

    async def record(*arguments: Any, **options: Any) -> "RequestOutput":
        recorded.append(await generate(*arguments, **options))
        return recorded[-1]

    monkeypatch.setattr(pair.vllm_engine, "_generate", record)
    return recorded


def test_compatible_routes_equal_those_of_transformers(pair: Pair) -> None:
    """Ids without a token are input and scored, and ranks are exact."""
    rows: list[Any] = []
    without = np.flatnonzero(~np.isin(np.arange(len(pair.vllm_engine._real_ids)), pair.real_ids))
    prompts = [[*map(int, pair.real_ids[:70])], [5, int(without[0]), int(without[-1]), 6], [7]]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 3, "temperature": 0.5}
    for service in (pair.vllm, pair.transformers):
        response = send(create_app(service), "/v1/completions", body)
        assert response.status_code == 200, response.text
        rows.append([c["prompt_logprobs"] for c in response.json()["choices"]])
    assert [*map(len, rows[0])] == [70, 4, 1]
    for entries, expected in zip(*map(chain.from_iterable, rows), strict=True):
        assert (entries or {}).keys() == (expected or {}).keys()
        for token, entry in (entries or {}).items():
            assert entry["rank"] == expected[token]["rank"]
            assert abs(entry["logprob"] - expected[token]["logprob"]) < 1e-4


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


def ids_without_token(pair: Pair) -> list[int]:
    """Return an id in a gap, and one behind the tokenizer."""
    size = int(pair.real_ids[-1]) + 1
    gaps = np.setdiff1d(np.arange(size), pair.real_ids)
    assert len(gaps) > 8
    assert size < pair.vllm.manifest.logit_width
    return [int(gaps[0]), size]


@pytest.mark.parametrize("field", ["prompt_token_ids", "completion_token_ids", "candidate_ids"])
def test_ids_without_token_are_rejected_by_both(field: str, pair: Pair) -> None:
    plain = {"prompt_token_ids": [5, 6], "completion_token_ids": [7], "candidate_ids": [[8, 9]]}
    for token in [*ids_without_token(pair), pair.vllm.manifest.logit_width, -1]:
        ids: Any = [[8, token]] if field == "candidate_ids" else [token]
        body = {"sequences": [{**plain, field: ids}], "top_k": 1}
        responses = [post(create_app(each), body) for each in (pair.vllm, pair.transformers)]
        first, second = (response.json() for response in responses)
        assert responses[0].status_code == responses[1].status_code == 400
        for each in (first, second):
            each.pop("instance", None)
            each.pop("request_id", None)
        assert first == second


def test_ids_without_token_have_equal_scores(pair: Pair) -> None:
    """Such ids have no probability; as input they have an embedding."""
    without = ids_without_token(pair)
    prompt = np.array([5, without[0], 6, without[1]], np.int32)
    completion = np.array([7, without[0], 8, without[1], 9], np.int32)
    row = np.array([7, 8, *without], np.int32)
    tasks = [ScoringTask(prompt, completion), ScoringTask(prompt, completion, (row,) * 5)]
    for temperature in (1.0, 0.1):
        for scores, expected in pair.score(tasks, 6, temperature):
            assert_equal(scores, expected)
            assert np.isneginf(scores.token_logprobs).tolist() == [False, True, False, True, False]
            assert not np.isin(scores.ids, without).any()
            total = np.exp(scores.logprobs.astype(float)).sum(axis=1)
            np.testing.assert_allclose(total + np.exp(scores.tail_logprobs), 1, atol=1e-5)


def test_candidates_and_temperatures_are_supported(pair: Pair) -> None:
    assert pair.vllm.manifest.features == pair.transformers.manifest.features
    plain = pair.tasks((5, 4), (70, 90))
    token = int(plain[0].completion_ids[1])
    candidates = [[3, 9, 40], [token], [], [7, 8]], [[*range(20)]] * 90
    tasks = [
        ScoringTask(
            task.prompt_ids, task.completion_ids, tuple(np.array(r, np.int32) for r in rows)
        )
        for task, rows in zip(plain, candidates, strict=True)
    ]
    for temperature in (1.0, 0.5):
        for scores, expected in pair.score([*tasks, *plain], 5, temperature):
            assert_equal(scores, expected)


def test_tails_of_a_confident_teacher_are_exact(pair: Pair) -> None:
    """A median of 0.985 for the most likely token leaves 1e-8 and less outside 64 entries, where
    one minus their float32 sum has no correct digit."""
    (task,) = pair.tasks((8, 200))
    model = pair.transformers_engine._model.double()
    ids = np.concatenate([task.prompt_ids, task.completion_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long()).logits[0, 7:-1]
    model.float()
    logits = logits[:, torch.from_numpy(pair.real_ids)].numpy()
    low, high = 1e-4, 1.0
    for _ in range(40):
        temperature = (low * high) ** 0.5
        logprobs = log_softmax(logits / temperature, axis=1)
        confident = np.median(np.exp(logprobs.max(axis=1))) > 0.985
        low, high = (temperature, high) if confident else (low, temperature)
    columns = np.full(pair.real_ids.max() + 1, -1)
    columns[pair.real_ids] = np.arange(len(pair.real_ids))
    for k in (8, 64):
        for scores in pair.score([task], k, temperature)[0]:
            rest = logprobs.copy()
            np.put_along_axis(rest, columns[scores.ids], -np.inf, axis=1)
            tails = np.logaddexp.reduce(rest, axis=1)
            assert np.median(tails) < -10
            np.testing.assert_allclose(scores.tail_logprobs, tails, rtol=0, atol=1e-3)
            best = -np.sort(-logprobs, axis=1)[:, :k]
            np.testing.assert_allclose(scores.logprobs, best, rtol=0, atol=1e-3)


def test_shared_prompts_are_read_from_the_cache_and_completions_are_not(
    pair: Pair, outputs: "list[RequestOutput]"
) -> None:
    (first, *others) = pair.tasks((150, 60), (1, 60), (1, 60), (1, 60))
    samples = [ScoringTask(first.prompt_ids, each.completion_ids) for each in others]
    together = np.concatenate([first.prompt_ids, first.completion_ids])
    batches = [
        [first],
        samples,
        [first],  # scored before
        [ScoringTask(together[:140], together[140:])],  # another prompt of the same sequence
        [ScoringTask(together, samples[0].completion_ids[:30])],  # a prompt that was a completion
        [ScoringTask(together[:1], together[1:])],
    ]
    for batch in batches:
        for scores, expected in pair.score(batch, 5):
            assert_equal(scores, expected)
    cached = [output.num_cached_tokens for output in outputs]
    shared = 150 // BLOCK * BLOCK
    # The completion of ``together`` is in the cache only for its own request.
    assert cached == [0, shared, shared, shared, shared, 140 // BLOCK * BLOCK, shared, 0]


def test_adapters_have_equal_scores_and_manifests(
    pair: Pair, outputs: "list[RequestOutput]"
) -> None:
    for name in ("rank-2", "rank-9"):
        left, right = pair.vllm.manifests[name], pair.transformers.manifests[name]
        assert (left.model, left.revision) == (right.model, right.revision)
    (task,) = pair.tasks((100, 60))
    tasks = [replace(task, adapter=name) for name in (None, "rank-2", "rank-9")]
    for _ in range(2):  # adapters do not share a cached prompt
        results = pair.score(tasks, 5)
        for scores, expected in results:
            assert_equal(scores, expected)
        base, *others = [scores.token_logprobs for scores, _ in results]
        assert all(np.abs(each - base).max() > 1e-2 for each in others)
    assert [output.num_cached_tokens for output in outputs] == [0] * 3 + [100 // BLOCK * BLOCK] * 3


def test_incomplete_rows_are_computed_again_without_the_cache(
    pair: Pair, outputs: "list[RequestOutput]", monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = pair.vllm_engine._generate

    async def without_last_row(*arguments: Any, **options: Any) -> "RequestOutput":
        output: Any = await generate(*arguments, **options)
        if not options["skip_reading_prefix_cache"]:
            arrays = output.prompt_logprobs
            output.prompt_logprobs = replace(
                arrays, ids=arrays.ids[:-1], logprobs=arrays.logprobs[:-1]
            )
        return output

    monkeypatch.setattr(pair.vllm_engine, "_generate", without_last_row)
    tasks = pair.tasks((150, 60))
    for _ in range(2):
        for scores, expected in pair.score(tasks, 5):
            assert_equal(scores, expected)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 128, 0]


def test_preempted_sequences_have_equal_scores(pair: Pair) -> None:
    def preemptions() -> float:
        return REGISTRY.get_sample_value(
            "vllm:num_preemptions_total", {"model_name": str(pair.folder), "engine": "0"}
        )  # pyright: ignore[reportReturnType]

    before = preemptions()
    tasks = pair.tasks(*[(100 + length, 140 - length) for length in range(0, 120, 8)])
    for scores, expected in pair.score(tasks, 5):
        assert_equal(scores, expected)
    assert preemptions() > before


def test_unknown_version_of_vllm_returns_lists(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are compared in an engine process that has the extension, so by a stand-in."""
    monkeypatch.setattr(pair.vllm_engine, "_rows", False)
    (task,) = pair.tasks((5, 4))
    (full,) = pair.transformers_engine.score([task], top_k=6, temperature=1.0)
    distributions = [
        dict(zip(*row, strict=True)) for row in zip(full.ids, full.logprobs, strict=True)
    ]
    flat = Flat()
    for position in range(task.tokens):
        row = position - len(task.prompt_ids)
        token = (int(task.completion_ids[row]), float(full.token_logprobs[row])) if row >= 0 else ()
        flat.append([token, *distributions[row].items()] if row >= 0 else [])

    async def generate(*_: object, **options: Any) -> SimpleNamespace:
        assert options == {"prompt_logprobs": 6, "flat_logprobs": True}
        return SimpleNamespace(prompt_logprobs=flat, metrics=None)

    monkeypatch.setattr(pair.vllm_engine, "_generate", generate)
    ((scores, expected),) = pair.score([task], 6)
    assert_equal(scores, expected)


def test_engine_arguments_have_the_types_of_vllm() -> None:
    from mopd_server.engines.vllm.arguments import OWN_OPTIONS, parse_arguments

    pairs = ("block-size=64", "enforce_eager=false", "compilation_config.mode=0", "seed=3")
    parsed = parse_arguments(pairs)
    assert parsed.pop("compilation_config").mode == 0
    assert parsed == {"block_size": 64, "enforce_eager": False, "seed": 3}
    for pair in (*(f"{name}=1" for name in OWN_OPTIONS), "no_such=1", "block_size=x", "port=80"):
        with pytest.raises(ConfigError) as caught:
            parse_arguments([pair])
        assert caught.value.key == "vllm_arg"


def test_waiting_processes_of_vllm_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # restored afterwards
    polls: list[float] = []
    condition = SpinCondition.__new__(SpinCondition)
    condition.is_reader, condition.busy_loop_s, condition.last_read = True, 1.0, time.monotonic()
    condition.read_cancel_socket = condition.local_notify_socket = None
    condition.poller = SimpleNamespace(poll=lambda timeout: polls.append(timeout) or {})
    condition.wait(5000)
    assert not polls
    assert wait_without_spinning()
    condition.wait(5000)
    condition.wait(None)
    condition.wait(50)
    assert polls == [100, 100, 50]


def test_cancelled_request_is_aborted_in_vllm(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pair.vllm_engine._llm
    aborted: list[str] = []
    abort = llm.abort

    async def recorded_abort(request_id: str, **options: Any) -> None:
        aborted.append(request_id)
        await abort(request_id, **options)

    monkeypatch.setattr(llm, "abort", recorded_abort)
    body = {"prompt_token_ids": [1] * 200, "completion_token_ids": [2] * 50}
    request = LogprobsRequest.model_validate(
        {"sequences": [body] * 20, "top_k": pair.vllm.manifest.max_top_k}
    )

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
