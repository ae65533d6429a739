"""The vLLM engine, started once, against the transformers engine on the same weights."""

import asyncio
import multiprocessing
import os
import re
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
from mopd_server.engines.base import AsyncEngine, EngineDead, EngineTimes, ScoringTask
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.scoring.loading import load_engine
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenization import RequestTokenizer
from mopd_server.scoring.tokenizer_loading import load_tokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.server.tiny_teachers import get, post
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm

if TYPE_CHECKING:  # importing vLLM takes seconds
    from mopd_server.engines.vllm.engine import VllmEngine

#: Sequences of up to 255 tokens are read in several steps.
STEP_TOKENS = 64
TOP_K_MAX = 500


@dataclass(frozen=True)
class Pair:
    """One model folder behind both engines, each with a service around it."""

    vllm_engine: "VllmEngine"
    transformers_engine: TransformersEngine
    vllm: TeacherService
    transformers: TeacherService
    real_ids: np.ndarray

    def tasks(self, *lengths: tuple[int, int]) -> list[ScoringTask]:
        """Random sequences of these lengths of prompt and completion."""
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
        """Each task's scores by vLLM, all in flight at once, and by transformers."""

        async def by_vllm() -> list[tuple[TopKLogprobs, EngineTimes]]:
            score = self.vllm_engine.score
            return await asyncio.gather(*(score(t, top_k=top_k, temperature=1.0) for t in tasks))

        expected = self.transformers_engine.score(tasks, top_k=top_k, temperature=1.0)
        return list(zip([found for found, _ in asyncio.run(by_vllm())], expected, strict=True))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with heads of 32, the narrowest that vLLM's CPU attention takes."""
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
        ours = TeacherSettings(engine="vllm", **settings)
        theirs = TeacherSettings(engine="transformers", **settings)
        tokenizer = RequestTokenizer(load_tokenizer(ours))
        vllm, transformers = (load_engine(each, tokenizer.table) for each in (ours, theirs))
        assert isinstance(vllm, AsyncEngine)
        assert isinstance(transformers, TransformersEngine)
        services = (
            TeacherService(tokenizer, vllm, ours),
            TeacherService(tokenizer, transformers, theirs),
        )
        for service in services:
            service.warm_up()
            assert service.ready, service.failure
        yield Pair(vllm, transformers, *services, np.flatnonzero(tokenizer.table.present))
        services[0].close()


def require_alike(found: TopKLogprobs, expected: TopKLogprobs) -> None:
    """The same numbers to rounding, and the same ids wherever rounding cannot swap them."""
    assert found.ids.shape == expected.ids.shape
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        np.exp(found.tail_logprobs), np.exp(expected.tail_logprobs), atol=1e-5
    )
    gaps = -np.diff(expected.logprobs, axis=1, append=-np.inf)
    apart = (gaps > 1e-4) & (np.roll(gaps, 1, axis=1) > 1e-4)
    apart[:, 0] = gaps[:, 0] > 1e-4
    apart[:, -1] = False  # its neighbour is not among the entries
    assert apart.sum() > 0 or found.k < 2
    np.testing.assert_array_equal(found.ids[apart], expected.ids[apart])


def test_candidates_never_become_objects(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def lists_were_made(*_: object, **__: object) -> None:
        raise AssertionError("vLLM made lists of its arrays")

    monkeypatch.setattr("mopd_server.engines.vllm.engine.topk_of_flat", lists_were_made)
    for found, expected in pair.score(pair.tasks((3, 200), (1, 9)), 4):
        require_alike(found, expected)


@pytest.mark.parametrize("top_k", [1, 4, 64, None])
def test_ragged_sequences_score_alike(top_k: int | None, pair: Pair) -> None:
    tasks = pair.tasks((1, 1), (1, 30), (40, 3), (5, 5), (100, 154), (3, 0), (64, 64), (63, 1))
    k = len(pair.real_ids) if top_k is None else top_k
    for task, (found, expected) in zip(tasks, pair.score(tasks, k), strict=True):
        assert len(found) == len(task.completion_ids)
        if len(found):
            require_alike(found, expected)
        assert set(found.ids.ravel().tolist()) <= {*pair.real_ids.tolist()}


def test_all_entries_leave_no_tail_and_hold_all_probability(pair: Pair) -> None:
    ((found, _),) = pair.score(pair.tasks((2, 20)), len(pair.real_ids))
    assert np.isneginf(found.tail_logprobs).all()
    np.testing.assert_allclose(np.exp(found.logprobs.astype(float)).sum(axis=1), 1, atol=1e-5)


def test_the_manifest_says_what_this_engine_does_not_do(pair: Pair) -> None:
    manifest, other = pair.vllm.manifest, pair.transformers.manifest
    assert (manifest.engine, manifest.dtype) == ("vllm", "float32")
    assert manifest.features.temperature is False
    assert manifest.revision == other.revision
    assert manifest.logit_width == other.logit_width > len(pair.real_ids)
    assert manifest.max_model_len == other.max_model_len - 1
    assert manifest.max_top_k == len(pair.real_ids)


def test_the_longest_sequence_is_scored_and_a_longer_one_refused(pair: Pair) -> None:
    longest = pair.vllm.manifest.max_model_len
    tasks = pair.tasks((longest - 10, 10))
    for found, expected in pair.score(tasks, 3):
        require_alike(found, expected)
    ids = [int(pair.real_ids[-1])] * (longest + 1)
    answer = post(create_app(pair.vllm), {
        "sequences": [{"prompt_token_ids": ids[:1], "completion_token_ids": ids[1:]}], "top_k": 1,
    })  # fmt: skip
    assert answer.status_code == 413


SEQUENCES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "3 + 4 ="}], "completion": "7", "finished": True},
    {"prompt": "the quick", "completion": " brown fox jumps"},
    {"prompt": "def add(a, b):", "completion": "\n    return a + b\n" * 8, "finished": True},
]


def test_both_services_answer_a_request_alike(pair: Pair) -> None:
    body = {"sequences": SEQUENCES, "top_k": 6}
    found, expected = (
        post(create_app(service), body).json()["sequences"]
        for service in (pair.vllm, pair.transformers)
    )
    assert [sequence.keys() for sequence in found] == [sequence.keys() for sequence in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            if "logprobs" in name:
                np.testing.assert_allclose(ours[name], value, atol=1e-4)
            elif name != "top_ids":
                assert ours[name] == value


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"temperature": 0.5}, "temperature"), ({"top_k": TOP_K_MAX + 1}, "top_k")],
)
def test_what_it_does_not_offer_is_refused(asked: dict[str, Any], field: str, pair: Pair) -> None:
    answer = post(create_app(pair.vllm), {"sequences": SEQUENCES, "top_k": 1, **asked})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(field)


def test_candidates_are_asked_row_by_row_as_vllm_documents_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM scores chosen ids only on accelerators, so its answer is computed here, by its manual:
    row ``i`` predicts prompt token ``prompt_logprob_start + i + 1``, and ``-1`` scores ``-inf``."""
    (plain,) = pair.tasks((5, 4))
    token = int(plain.completion_ids[1])
    candidates = [[3, 9, 40], [token], [], [7, 8]]
    rows = tuple(np.array(row, dtype=np.int32) for row in candidates)
    task = ScoringTask(plain.prompt_ids, plain.completion_ids, rows)
    whole = ScoringTask(plain.prompt_ids[:1], np.concatenate([plain.prompt_ids[1:],
                                                              plain.completion_ids]))  # fmt: skip
    everything = len(pair.real_ids)
    (of_all,) = pair.transformers_engine.score([whole], top_k=everything, temperature=1.0)

    async def read(
        asked: ScoringTask, *, prompt_logprob_token_ids: np.ndarray, prompt_logprob_start: int
    ) -> SimpleNamespace:
        assert prompt_logprob_start + len(prompt_logprob_token_ids) == asked.tokens - 1
        found = np.full(prompt_logprob_token_ids.shape, -np.inf, dtype=np.float32)
        for (row, column), token_id in np.ndenumerate(prompt_logprob_token_ids):
            if token_id >= 0:
                # Row r of ``of_all`` predicts token r + 1 of what was read.
                predicted = of_all.ids[prompt_logprob_start + row]
                found[row, column] = of_all.logprobs[prompt_logprob_start + row][
                    predicted == token_id
                ][0]
        return SimpleNamespace(prompt_token_id_logprobs=found, metrics=None)

    assert pair.vllm.manifest.features.candidate_ids is False
    monkeypatch.setattr(pair.vllm_engine, "_read", read)
    ((found, expected),) = pair.score([task], 1)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-5)
    np.testing.assert_allclose(found.tail_logprobs, expected.tail_logprobs, atol=1e-5)


def test_a_request_that_is_given_up_is_aborted_in_vllm(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pair.vllm_engine._llm
    aborted: list[str] = []
    abort = llm.abort

    async def watched(request_id: str, **options: Any) -> None:
        aborted.append(request_id)
        await abort(request_id, **options)

    monkeypatch.setattr(llm, "abort", watched)
    body = {"prompt_token_ids": [1] * 200, "completion_token_ids": [2] * 50}
    request = LogprobsRequest.model_validate({"sequences": [body] * 20, "top_k": 400})

    async def scenario() -> None:
        gone = asyncio.create_task(pair.vllm.score(request))
        while not llm.get_num_unfinished_requests():
            assert not gone.done()
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})
        while llm.get_num_unfinished_requests():
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert len(aborted) > 0
    metrics = pair.vllm.metrics.exposition().decode()
    counted = re.search(r"^mopd_cancelled_sequences_total (.*)$", metrics, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) >= len(aborted)  # some may not have reached vLLM yet
    assert "mopd_queue_sequences 0.0" in metrics
    ((found, expected),) = pair.score(pair.tasks((4, 9)), 5)  # and the engine goes on
    require_alike(found, expected)


def test_the_end_of_a_process_is_told_though_vllm_waited_for_it_first() -> None:
    """Whoever waits for a process in another thread's stead finds none, until that has its word."""
    from mopd_server.engines.vllm.engine import _end_of

    statuses = iter([None, None, -signal.SIGKILL])

    class WaitedForElsewhere:
        name = "EngineCore"
        exitcode = property(lambda self: next(statuses))

    ended: Any = WaitedForElsewhere()
    assert _end_of([ended]) == "the vLLM process EngineCore was ended by SIGKILL"


def test_when_its_process_is_killed_the_service_says_so(pair: Pair) -> None:
    # The last test of this file: nothing is scored afterwards.
    told = threading.Event()
    causes: list[str] = []

    def hear(cause: str) -> None:
        causes.append(cause)
        told.set()

    pair.vllm.on_engine_death = hear
    (engine_core,) = [p for p in multiprocessing.active_children() if "EngineCore" in p.name]
    assert engine_core.pid is not None
    os.kill(engine_core.pid, signal.SIGKILL)
    assert told.wait(timeout=600)
    assert causes == ["the vLLM process EngineCore was ended by SIGKILL"]
    assert (pair.vllm.ready, pair.vllm.failure) == (False, causes[0])
    assert get(create_app(pair.vllm), "/readyz").status_code == 503
    with pytest.raises(EngineDead, match="ended by SIGKILL"):
        pair.score(pair.tasks((2, 2)), top_k=1)
    assert len(causes) == 1
