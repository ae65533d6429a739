"""Requests go to the fewest tokens in flight, and prompts to the cache that has them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.transport import balance
from mopd_client.transport.balance import (
    BATCH_TOKENS,
    BUSIEST,
    CACHED_TOKENS,
    LEAST_PROMPT_TOKENS,
    Balance,
    Work,
    work_of,
)
from mopd_client.transport.replica import Replica
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message


def replicas_of(count: int) -> list[Replica]:
    return [Replica(f"http://{number}") for number in range(count)]


def work(tokens: int, *prompts: int) -> Work:
    return Work(tokens, frozenset(bytes([prompt]) for prompt in prompts))


def sent(chooser: Balance, replicas: list[Replica], request: Work) -> Replica:
    """Choose a replica and send the request."""
    replica = chooser.choose(replicas, request, now=0.0, failed=None)
    chooser.record(replica, request)
    replica.in_flight += request.tokens
    return replica


def test_the_available_replica_with_the_fewest_tokens_is_chosen() -> None:
    chooser = Balance()
    idle, busy = Replica("http://a", in_flight=10), Replica("http://b", in_flight=20)
    paused = Replica("http://c", not_before=5.0)

    def choose(*replicas: Replica, now: float = 1.0, failed: Replica | None = None) -> Replica:
        return chooser.choose(replicas, Work(1), now=now, failed=failed)

    assert choose(busy, idle, paused) is idle
    assert choose(busy, idle, paused, failed=idle) is busy
    assert choose(busy, idle, paused, now=5.0) is paused
    assert choose(paused, failed=paused) is paused
    idle.sent, busy.in_flight = 1, 10
    assert choose(idle, busy) is busy


@pytest.mark.parametrize("more", [0, 1])
def test_a_prompt_follows_its_cache_up_to_the_bound_of_the_load(more: int) -> None:
    chooser, replicas = Balance(), replicas_of(4)
    first = sent(chooser, replicas, work(100, 7))
    # The load at which in_flight = BUSIEST * (in_flight + tokens) / 4 + BATCH_TOKENS
    tokens = 0
    first.in_flight = int(BATCH_TOKENS / (1 - BUSIEST / 4)) + more
    chosen = chooser.choose(replicas, work(tokens, 7), now=0.0, failed=None)
    assert (chosen is first) == (not more)


@pytest.mark.parametrize("state", ["failed", "paused", "gone"])
def test_a_prompt_does_not_wait_for_its_cache(state: str) -> None:
    chooser, replicas = Balance(), replicas_of(3)
    first = sent(chooser, replicas, work(100, 7))
    failed = first if state == "failed" else None
    if state == "paused":
        first.not_before = 1.0
    left = [each for each in replicas if each is not first] if state == "gone" else replicas
    assert chooser.choose(left, work(100, 7), now=0.0, failed=failed) is not first


@pytest.mark.parametrize("more", [0, 1])
def test_a_prompt_is_forgotten_when_it_has_left_the_cache(more: int) -> None:
    chooser, replicas = Balance(), replicas_of(2)
    first = sent(chooser, replicas, work(100, 7))
    chooser.record(first, Work(CACHED_TOKENS + more))
    first.in_flight = 1
    assert (chooser.choose(replicas, work(1, 7), now=0.0, failed=None) is first) == (not more)


@pytest.mark.parametrize("count", [3, 4])
def test_the_oldest_prompt_is_forgotten(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "MOST_PROMPTS", 3)
    chooser, replicas = Balance(), replicas_of(2)
    for prompt in range(count):
        sent(chooser, replicas, work(100, prompt))
    assert (chooser.cached_at(work(1, 0), replicas) is None) == (count > 3)


def test_of_several_prompts_the_majority_counts() -> None:
    chooser, replicas = Balance(), replicas_of(3)
    places = [sent(chooser, replicas, work(100, prompt)) for prompt in range(3)]
    sent(chooser, replicas, work(1, 3, 0))
    assert chooser.cached_at(work(1, 3, 0, 1), replicas) is places[0]


def test_a_new_replica_gets_an_equal_share_of_the_prompts() -> None:
    chooser, replicas = Balance(), replicas_of(4)
    for prompt in range(100):
        sent(chooser, replicas, work(100, prompt))
    new = Replica("http://new")
    chooser.add(new, replicas)
    for each in replicas:
        each.in_flight = 0
    replicas.append(new)
    places = Counter(sent(chooser, replicas, work(100, prompt)).url for prompt in range(100))
    assert places["http://new"] in (19, 20, 21)


@pytest.mark.parametrize("form", ["ids", "prompt"])
def test_work_of_sequences(form: str) -> None:
    def sequence(tokens: int, completion: int) -> SequenceRequest:
        text = "1234" * tokens
        prompt = {
            "ids": {"prompt_token_ids": [5] * tokens},
            "prompt": {"prompt": text},
        }[form]
        sent = {"completion_token_ids": [7] * completion}
        if form != "ids":
            sent = {"completion": "1234" * completion}
        return SequenceRequest.model_validate({**prompt, **sent})

    least = LEAST_PROMPT_TOKENS
    samples = [sequence(least, 3), sequence(least, 9)]
    assert work_of(samples).tokens == 2 * least + 12
    assert len(work_of(samples).prompts) == 1
    assert len(work_of([*samples, sequence(least + 1, 3)]).prompts) == 2
    assert work_of([sequence(least - 1, 3)]).prompts == frozenset()


def test_tools_and_variables_of_the_template_are_part_of_the_prompt() -> None:
    message = [Message(role="user", content="1234" * LEAST_PROMPT_TOKENS)]
    plain = SequenceRequest(messages=message, completion="7")
    other = plain.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    assert len(work_of([plain, other]).prompts) == 2


REQUESTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40_000), st.lists(st.integers(0, 3))), max_size=60
)


@given(REQUESTS, st.integers(1, 4))
def test_no_request_is_sent_above_the_bound(
    requests: list[tuple[int, int, list[int]]], count: int
) -> None:
    """Also where nothing follows a cache: then to the least loaded replica."""
    chooser, replicas = Balance(), replicas_of(count)
    in_flight: dict[Replica, list[int]] = {replica: [] for replica in replicas}
    last: dict[int, Replica] = {}
    for prompt, tokens, ended in requests:
        for number in ended:
            replica = replicas[number % count]
            if in_flight[replica]:
                replica.in_flight -= in_flight[replica].pop(0)
        loads = {each: each.in_flight for each in replicas}
        bound = BUSIEST * (sum(loads.values()) + tokens) / count + BATCH_TOKENS
        chosen = sent(chooser, replicas, work(tokens, prompt))
        if loads[chosen] > min(loads.values()):
            assert chosen is last[prompt]
            assert loads[chosen] <= bound
        elif prompt in last and loads[last[prompt]] <= bound and last[prompt].sent < CACHED_TOKENS:
            assert chosen is last[prompt]
        in_flight[chosen].append(tokens)
        last[prompt] = chosen


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=80), st.integers(1, 5))
def test_requests_of_different_prompts_differ_by_at_most_one_request(
    sizes: list[int], count: int
) -> None:
    chooser, replicas = Balance(), replicas_of(count)
    for size in sizes:
        sent(chooser, replicas, Work(size))
    loads = [replica.in_flight for replica in replicas]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(64, 1500, 2000), (64, 6000, 500), (256, 300, 300)])
def test_samples_sent_one_by_one_are_even_and_compute_few_prompts_again(
    shape: tuple[int, int, int], seed: int
) -> None:
    """8 samples of each prompt in random order within 4 prompts, up to 32 in flight, scored by
    the four replicas at one speed; a replica computes the prompts that it has not had."""
    draw = random.Random(seed)
    count, prompt, completion = shape
    order = [number for number in range(count) for _ in range(8)]
    order.sort(key=lambda number: number + 4 * draw.random())
    chooser, replicas = Balance(), replicas_of(4)
    in_flight: dict[Replica, list[int]] = {replica: [] for replica in replicas}
    scored = dict.fromkeys(replicas, 0)
    computed: set[tuple[str, int]] = set()
    for number in order:
        if sum(map(len, in_flight.values())) == 32:
            replica = min((r for r in replicas if in_flight[r]), key=scored.__getitem__)
            scored[replica] += in_flight[replica][0]
            replica.in_flight -= in_flight[replica].pop(0)
        tokens = prompt + int(completion * draw.uniform(0.2, 1.8))
        replica = sent(chooser, replicas, work(tokens, number % 256))
        in_flight[replica].append(tokens)
        computed.add((replica.url, number))
    mean = sum(replica.sent for replica in replicas) / 4
    assert len(computed) <= 1.2 * count
    assert all(abs(replica.sent - mean) <= 0.15 * mean for replica in replicas)
