"""A call to several replicas is divided so that all work, and prompts are computed once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client import request_parts
from mopd_client.request_parts import Part, divide
from mopd_client.transport.balance import Balance, Work, work_of
from mopd_client.transport.replica import Replica
from mopd_protocol.requests import SequenceRequest


def samples(prompts: int, each: int, prompt: int, completion: int) -> list[SequenceRequest]:
    """Samples of prompts, in an order that does not group them."""
    return [
        SequenceRequest(
            prompt_token_ids=[number] * prompt, completion_token_ids=[sample] * completion
        )
        for sample in range(each)
        for number in range(prompts)
    ]


def nowhere(work: Work) -> str:
    return ""


def loads(sequences: list[SequenceRequest], parts: list[Part], replicas: int) -> list[int]:
    """Return the tokens of each replica when all parts are sent at once."""
    balance, used = Balance(), [Replica(f"http://{number}") for number in range(replicas)]
    for part in parts:
        work = work_of([sequences[index] for index in part.indices])
        if part.of_prompts:
            work = Work(work.tokens)
        replica = balance.choose(used, work, now=0.0, failed=None)
        balance.record(replica, work)
        replica.in_flight += work.tokens
    return [replica.in_flight for replica in used]


def prompts_sent(sequences: list[SequenceRequest], parts: list[Part]) -> int:
    """Return the prompts of all requests, each counted once a request."""
    return sum(
        len({str(sequences[index].prompt_token_ids) for index in part.indices}) for part in parts
    )


@pytest.mark.parametrize(
    ("prompts", "each", "replicas", "most_prompts"),
    [
        (8, 8, 4, 8),  # two prompts for each replica
        (9, 8, 4, 10),  # 3, 2, 2 and 2 would be a third above the mean
        (5, 8, 4, 8),
        (1, 64, 4, 4),
        (2, 32, 4, 4),
        (64, 1, 4, 64),
        (40, 8, 3, 42),
    ],
)
def test_a_step_is_even_and_divides_few_prompts(
    prompts: int, each: int, replicas: int, most_prompts: int
) -> None:
    sequences = samples(prompts, each, prompt=1500, completion=2000)
    parts = divide(sequences, 8, replicas=replicas, cached_at=nowhere)
    assert sorted(index for part in parts for index in part.indices) == [*range(len(sequences))]
    mean = len(sequences) * 3500 / replicas
    assert max(loads(sequences, parts, replicas)) <= 1.15 * mean
    assert prompts_sent(sequences, parts) <= most_prompts


@pytest.mark.parametrize("completion", [749, 750])
def test_a_prompt_is_divided_if_each_part_has_as_many_completion_tokens(completion: int) -> None:
    sequences = samples(1, 4, prompt=1500, completion=completion)
    parts = divide(sequences, 8, replicas=2, cached_at=nowhere)
    assert len(parts) == (1 if completion < 750 else 2)


@pytest.mark.parametrize(("size", "divided"), [(18, False), (17, True)])
def test_a_prompt_is_divided_where_a_share_would_differ_by_more_than_an_eighth(
    size: int, divided: bool
) -> None:
    """The first of two replicas has a share of 20 of 40 samples without a division."""
    sequences = [*samples(1, size, 100, 1000)]
    other = samples(2, 40 - size, 100, 1000)[1::2]
    parts = divide([*sequences, *other], 8, replicas=2, cached_at=nowhere)
    assert any(part.of_prompts for part in parts) == divided


def test_samples_of_one_prompt_are_one_request() -> None:
    sequences = samples(8, 8, prompt=1500, completion=2000)
    parts = divide(sequences, 8, replicas=4, cached_at=nowhere)
    prompts = [{sequences[index].prompt_token_ids[0] for index in part.indices} for part in parts]
    assert [len(each) for each in prompts] == [1] * 8
    assert not any(part.of_prompts for part in parts)


def test_small_samples_are_two_requests_for_each_replica() -> None:
    sequences = samples(64, 1, prompt=10, completion=10)
    parts = divide(sequences, 8, replicas=4, cached_at=nowhere)
    assert [len(part.indices) for part in parts] == [8] * 8


def test_a_request_has_prompts_of_one_cache() -> None:
    sequences = samples(16, 1, prompt=100, completion=10)
    places = {work_of([each]).prompts: str(index % 2) for index, each in enumerate(sequences)}
    parts = divide(sequences, 8, replicas=2, cached_at=lambda work: places[work.prompts])
    assert {index % 2 for index in parts[0].indices} != {0, 1}
    assert all(len({index % 2 for index in part.indices}) == 1 for part in parts)


def test_requests_keep_the_limits_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(request_parts.LIMITS, "sequences", 3)
    parts = divide(samples(1, 16, 100, 100), 8, replicas=2, cached_at=nowhere)
    assert max(len(part.indices) for part in parts) == 3


def test_one_replica_gets_consecutive_sequences() -> None:
    sequences = samples(4, 4, prompt=100, completion=100)
    assert divide(sequences, 8, replicas=1, cached_at=nowhere) == [Part([*range(16)])]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 80)), min_size=1, max_size=60),
    st.integers(1, 6),
    st.integers(0, 60),
)
def test_every_sequence_is_sent_once(
    sizes: list[tuple[int, int]], replicas: int, prompt: int
) -> None:
    sequences = [
        SequenceRequest(
            prompt_token_ids=[number] * (prompt + 1), completion_token_ids=[7] * completion
        )
        for number, completion in sizes
    ]
    parts = divide(sequences, 4, replicas=replicas, cached_at=nowhere)
    assert sorted(index for part in parts for index in part.indices) == [*range(len(sequences))]
    assert all(part.indices for part in parts)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_many_lengths_are_even(seed: int) -> None:
    draw = random.Random(seed)
    sequences = [
        SequenceRequest(
            prompt_token_ids=[number] * length, completion_token_ids=[7] * draw.randrange(50, 4000)
        )
        for number in range(32)
        for length in [draw.randrange(100, 3000)]
        for _ in range(8)
    ]
    for replicas in (2, 3, 4, 7):
        parts = divide(sequences, 8, replicas=replicas, cached_at=nowhere)
        tokens = loads(sequences, parts, replicas)
        assert max(tokens) <= 1.15 * sum(tokens) / replicas
        assert min(tokens) >= (0.85 if replicas < 5 else 0.8) * sum(tokens) / replicas
        assert prompts_sent(sequences, parts) <= 1.2 * 32
