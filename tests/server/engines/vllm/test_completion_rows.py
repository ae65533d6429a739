"""Tests of completion rows against float64 softmaxes, for any division into steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.vllm import worker_extension
from mopd_server.engines.vllm.completion_rows import CompletionRows, RowRequest
from mopd_server.engines.vllm.prefix_cache import limit_hits
from mopd_server.engines.vllm.worker_extension import RowsOfV2, ScoringWorkerExtension, rows_of_v1

HIDDEN, WIDTH = 5, 40
EQUAL = {"atol": 1e-5, "rtol": 1e-5}
HEAD = torch.randn(HIDDEN, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def outputs_without_vllm() -> Iterator[None]:
    """Return tuples in place of a class of vLLM, which need not be installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_extension, "_output", lambda *parts: parts)
        yield


@dataclass
class Sequence:
    """A sequence that vLLM computes in steps, and its request."""

    name: str
    request: RowRequest
    computed: int
    """Positions so far: those of a cached prefix at the beginning."""

    @property
    def length(self) -> int:
        return self.request.start + 1 + len(self.request.tokens)

    @property
    def hidden(self) -> torch.Tensor:
        seed = sum(self.name.encode()) + self.length
        return torch.randn(self.length, HIDDEN, generator=torch.Generator().manual_seed(seed))

    @property
    def sampling(self) -> Any:
        return SimpleNamespace(extra_args=self.request.encode())


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    drawn: list[Sequence] = []
    for number in range(draw(st.integers(1, 4))):
        rows, start = draw(st.integers(1, 6)), draw(st.integers(0, 6))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        candidates = np.array([rng.permutation(WIDTH)[:3] for _ in range(rows)], dtype=np.int32)
        candidates[0, 1:] = -1
        request = RowRequest(
            start,
            rng.integers(0, WIDTH, rows).astype(np.int32),
            draw(st.sampled_from([1, 3, WIDTH])),
            draw(st.sampled_from([1.0, 0.5])),
            candidates if draw(st.booleans()) else None,
        )
        drawn.append(Sequence(f"sequence-{number}", request, draw(st.integers(0, start))))
    return drawn


def steps_of(draw: Any, running: list[Sequence]) -> list[tuple[Sequence, int]]:
    """Return the sequences of one step, in the order of a batch, with their numbers of tokens."""
    chosen = draw(st.lists(st.sampled_from(running), min_size=1, unique_by=lambda s: s.name))
    return [(each, draw(st.integers(1, each.length - each.computed))) for each in chosen]


def run_v1(draw: Any, all_sequences: list[Sequence]) -> dict[str, Any]:
    """Compute with the stand-in of vLLM's first model runner; sequences may be preempted."""
    requests = {
        each.name: SimpleNamespace(
            sampling_params=each.sampling, prompt_token_ids=[0] * each.length, num_computed_tokens=0
        )
        for each in all_sequences
    }
    runner = SimpleNamespace(
        num_prompt_logprobs=dict.fromkeys(requests, 0),
        requests=requests,
        model=SimpleNamespace(compute_logits=lambda hidden: hidden @ HEAD),
    )
    compute = rows_of_v1(
        runner, CompletionRows(runner.model.compute_logits, WIDTH, torch.device("cpu"))
    )
    outputs: dict[str, Any] = {}
    while running := [each for each in all_sequences if each.name not in outputs]:
        preempted = draw(st.sampled_from([None, *running]))
        if preempted is not None and draw(st.booleans()):
            preempted.computed = 0
        step = steps_of(draw, running)
        hidden: list[torch.Tensor] = []
        for each, count in step:
            requests[each.name].num_computed_tokens = each.computed
            hidden.append(each.hidden[each.computed : each.computed + count])
            each.computed += count
        counts = [count for _, count in step]
        runner.query_start_loc = SimpleNamespace(np=np.cumsum([0, *counts]))
        names = [each.name for each, _ in step]
        runner.input_batch = SimpleNamespace(req_id_to_index={n: i for i, n in enumerate(names)})
        outputs |= compute(torch.cat(hidden), dict(zip(names, counts, strict=True)))
    assert not runner.num_prompt_logprobs
    return outputs


def run_v2(draw: Any, all_sequences: list[Sequence]) -> dict[str, Any]:
    """Compute with the stand-in of vLLM's second model runner."""
    worker = RowsOfV2(CompletionRows(lambda hidden: hidden @ HEAD, WIDTH, torch.device("cpu")))
    for index, each in enumerate(all_sequences):
        worker.add_request(each.name, index, each.sampling)
    lengths = np.array([each.length for each in all_sequences])
    outputs: dict[str, Any] = {}
    while running := [each for each in all_sequences if each.name not in outputs]:
        step = steps_of(draw, running)
        counts = np.array([count for _, count in step])
        batch = SimpleNamespace(
            req_ids=[each.name for each, _ in step],
            idx_mapping_np=np.array([all_sequences.index(each) for each, _ in step]),
            num_computed_prefill_tokens_np=np.array([each.computed for each, _ in step]),
            num_scheduled_tokens=counts,
            query_start_loc_np=np.cumsum([0, *counts]),
        )
        hidden = [each.hidden[each.computed : each.computed + count] for each, count in step]
        for each, count in step:
            each.computed += count
        outputs |= worker.compute_prompt_logprobs(
            None, torch.cat(hidden), batch, None, None, lengths
        )
    return outputs


@pytest.mark.parametrize("run", [run_v1, run_v2])
@given(st.data(), sequences())
def test_rows_equal_the_softmax_for_any_division_into_steps(
    run: Any, data: st.DataObject, all_sequences: list[Sequence]
) -> None:
    outputs = run(data.draw, all_sequences)
    for each in all_sequences:
        ids, values, *_ = outputs[each.name]
        request = each.request
        rows = slice(request.start, request.start + len(request.tokens))
        logprobs = (each.hidden.double() @ HEAD.double())[rows] / request.temperature
        logprobs = logprobs.log_softmax(dim=1)
        tokens = torch.from_numpy(request.tokens).long()[:, None]
        torch.testing.assert_close(values[:, :1].double(), logprobs.gather(1, tokens), **EQUAL)
        if request.candidates is None:
            expected, _ = logprobs.topk(request.top_k, dim=1)
            torch.testing.assert_close(values[:, 1:-1].double(), expected, **EQUAL)
        for row, distribution in enumerate(logprobs):
            kept = ids[row][ids[row] >= 0].long()
            if request.candidates is not None:
                assert {*kept.tolist()} == {*request.candidates[row].tolist()} - {-1}
            torch.testing.assert_close(
                values[row, 1 : 1 + len(kept)].double(), distribution[kept], **EQUAL
            )
            rest = distribution.index_fill(0, kept, -torch.inf).logsumexp(dim=0)
            torch.testing.assert_close(values[row, -1].double(), rest, **EQUAL)


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_cached_prefix_that_contains_completion_tokens_is_incomplete(rows: int, hit: int) -> None:
    request = RowRequest(4, np.zeros(rows, dtype=np.int32), 2, 1.0)
    each = Sequence("cached", request, min(4 + hit, 4 + rows))
    worker = RowsOfV2(CompletionRows(lambda hidden: hidden @ HEAD, WIDTH, torch.device("cpu")))
    worker.add_request(each.name, 0, each.sampling)
    batch = SimpleNamespace(
        req_ids=[each.name],
        idx_mapping_np=np.array([0]),
        num_computed_prefill_tokens_np=np.array([each.computed]),
        num_scheduled_tokens=np.array([each.length - each.computed]),
        query_start_loc_np=np.array([0]),
    )
    hidden = each.hidden[each.computed :]
    (output,) = worker.compute_prompt_logprobs(
        None, hidden, batch, None, None, np.array([each.length])
    ).values()
    assert len(output[0]) == len(output[1]) < rows + (hit == 0)


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 20))
def test_only_blocks_before_the_completion_are_shared(start: int, rows: int, block: int) -> None:
    request = RowRequest(start, np.zeros(rows, dtype=np.int32), 2, 1.0)
    hashes = [bytes([number]) * 32 for number in range((start + 1 + rows) // block)]
    vllm_request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=request.encode()), block_hashes=[*hashes]
    )
    limit_hits(vllm_request, block)
    kept = [new == old for new, old in zip(vllm_request.block_hashes, hashes, strict=True)]
    # A hit leaves the position that predicts the first completion token.
    assert kept == [(number + 1) * block <= start for number in range(len(hashes))]


def test_unknown_model_runner_is_left_unchanged() -> None:
    class Other:
        def _get_prompt_logprobs_dict(self, hidden_states: object) -> None: ...

    extension = ScoringWorkerExtension()
    extension.model_runner, extension.device = Other(), None
    assert extension.score_completion_rows(WIDTH) is False
    assert vars(extension.model_runner) == {}
