"""The simulation of a teacher's replicas: conservation, work, limits, and queueing theory."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scaling.simulation import (
    Fleet,
    Outcome,
    Request,
    ScoredSequence,
    ServiceTimes,
    simulate,
)
from bench.scaling.workload import Step, after_rollout, streamed
from mopd_client.request_parts import LIMITS

_TIMES = ServiceTimes(0.05, 1e-3, request_seconds=0.01, row_seconds=1e-5)

_sequences = st.builds(
    ScoredSequence, st.integers(0, 5), st.sampled_from([40, 100]), st.integers(1, 300)
)
_requests = st.lists(
    st.builds(Request, st.floats(0, 3), st.lists(_sequences, min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=40,
)
_fleets = st.builds(
    Fleet,
    st.integers(1, 4),
    max_batch_tokens=st.integers(100, 1500),
    max_concurrency=st.integers(1, 12),
    cached_prompts=st.integers(0, 3),
)


@settings(max_examples=60)
@given(_requests, _fleets)
def test_every_sequence_is_scored_once_within_the_limits(
    requests: list[Request], fleet: Fleet
) -> None:
    result = simulate(requests, _TIMES, fleet)
    assert Counter(id(each.request) for each in result.served) == Counter(map(id, requests))
    assert sum(batch.sequences for batch in result.batches) == sum(
        len(request.sequences) for request in requests
    )
    assert sum(batch.tokens for batch in result.batches) == sum(each.tokens for each in requests)
    rows = sum(request.rows for request in requests)
    for batch in result.batches:
        assert batch.tokens <= fleet.max_batch_tokens or batch.sequences == 1
        assert batch.end - batch.start == pytest.approx(0.05 + 1e-3 * batch.computed_tokens)
    assert rows <= sum(batch.computed_tokens for batch in result.batches)
    assert result.rows_per_second * result.seconds == pytest.approx(rows)
    changes = sorted(
        change
        for each in result.served
        for change in ((each.sent, 1), (each.finished, -1))
        if each.finished > each.sent
    )
    in_flight = np.cumsum([change for _, change in changes])
    assert in_flight.max() <= fleet.max_concurrency


@settings(max_examples=60)
@given(_requests, _fleets)
def test_no_replica_is_idle_while_its_queue_has_work(requests: list[Request], fleet: Fleet) -> None:
    result = simulate(requests, _TIMES, fleet)
    for replica in range(fleet.replicas):
        batches = [batch for batch in result.batches if batch.replica == replica]
        assert all(first.end <= second.start for first, second in pairwise(batches))
        gaps = [
            (first.end, second.start)
            for first, second in pairwise(batches)
            if first.end < second.start
        ]
        for served in result.served:
            if served.replica == replica:
                assert served.queued <= served.started < served.finished
                assert not any(
                    max(served.queued, start) < min(served.started, end) for start, end in gaps
                )


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_replica_with_batches_of_one_is_the_queue_of_theory(load: float) -> None:
    # M/D/1 (Pollaczek and Khinchine): the average wait is load * seconds / (2 - 2 * load).
    step = Step(prompts=3000, samples=1, prompt_tokens=1, completion_tokens=99, spread=0.0)
    seconds = 0.01 + 100 * 1e-4
    requests = streamed(step, rows_per_second=load * 99 / seconds, steps=1, seed=1)
    result = simulate(
        requests, ServiceTimes(0.01, 1e-4), Fleet(1, max_batch_tokens=100, max_concurrency=10**6)
    )
    expected = load * seconds / (2 - 2 * load)
    assert result.queue_seconds.mean() == pytest.approx(expected, rel=0.1)
    assert result.utilisation == [pytest.approx(load, rel=0.05)]


@pytest.mark.parametrize("replicas", [1, 4])
def test_saturated_replicas_score_full_batches(replicas: int) -> None:
    step = Step(prompts=2000, samples=1, prompt_tokens=20, completion_tokens=80, spread=0.0)
    requests = streamed(step, rows_per_second=math.inf, steps=1, seed=0)
    result = simulate(requests, ServiceTimes(0.1, 1e-3), Fleet(replicas, 1000, 400))
    expected = replicas * 10 * 80 / (0.1 + 1e-3 * 1000)
    assert result.rows_per_second == pytest.approx(expected, rel=0.03)
    assert min(result.utilisation) > 0.97


@pytest.mark.parametrize(("cached_prompts", "expected"), [(0, 4.0), (100, 1.0)])
def test_a_prompt_is_computed_once_while_it_is_cached(cached_prompts: int, expected: float) -> None:
    # One at a time: no two samples are in one batch.
    result = _run(Fleet(4, max_concurrency=1, cached_prompts=cached_prompts))
    assert result.prompts_computed == expected


def test_samples_of_a_prompt_in_one_batch_compute_it_once() -> None:
    sequences = tuple(ScoredSequence(0, 500, 10) for _ in range(4))
    result = simulate([Request(0.0, sequences)], _TIMES, Fleet(1))
    assert [batch.computed_tokens for batch in result.batches] == [540]


def test_loads_of_replicas_are_even() -> None:
    utilisation = _run(Fleet(4, cached_prompts=100)).utilisation
    assert max(utilisation) < 1.15 * np.mean(utilisation)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_step_is_divided_within_the_limits_of_a_request(replicas: int) -> None:
    step = Step(prompts=256, samples=4, prompt_tokens=100, completion_tokens=500)
    requests = after_rollout(step, step_seconds=9.0, steps=2, replicas=replicas, top_k=64, seed=0)
    assert {request.arrival for request in requests} == {0.0, 9.0}
    assert sum(len(request.sequences) for request in requests) == 2 * 256 * 4
    assert all(request.rows * 64 <= LIMITS["entries"] for request in requests)
    assert len(requests) >= 2 * (1 if replicas == 1 else 2 * replicas)
    places = Counter(
        prompt
        for request in requests
        for prompt in {sequence.prompt for sequence in request.sequences}
    )
    assert set(places.values()) == {1}


def test_streamed_requests_have_the_rate_and_the_lengths() -> None:
    step = Step(prompts=500, samples=4, prompt_tokens=300, completion_tokens=200)
    requests = streamed(step, rows_per_second=1000.0, steps=2, seed=0, sample_seconds=1.0)
    rows = sum(request.rows for request in requests)
    assert rows == pytest.approx(4000 * 200, rel=0.03)
    assert rows / requests[-1].arrival == pytest.approx(1000.0, rel=0.1)
    lengths = [request.sequences[0].completion_tokens for request in requests]
    assert np.std(lengths) == pytest.approx(0.5 * 200, rel=0.1)


def _run(fleet: Fleet) -> Outcome:
    step = Step(prompts=100, samples=4, prompt_tokens=200, completion_tokens=100)
    requests = streamed(step, rows_per_second=2000.0, steps=1, seed=0)
    return simulate(requests, _TIMES, fleet)
