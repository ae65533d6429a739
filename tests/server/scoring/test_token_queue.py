"""Tests of the queue: its limit in tokens, and its Retry-After seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.scoring.token_queue import MAX_RETRY_SECONDS, TokenQueue
from mopd_server.service_error import ServiceError

#: Entries are names of at most ten letters, with one token per letter.
names = st.text(alphabet="ab", min_size=1, max_size=10)


def full_queue(tokens: int) -> TokenQueue[str]:
    queue: TokenQueue[str] = TokenQueue(len, max_tokens=100)
    queue.add(["x" * tokens])
    return queue


def retry_after(queue: TokenQueue[str]) -> int | None:
    with pytest.raises(ServiceError) as caught:
        queue.add(["x" * 1000])
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    return caught.value.retry_after_seconds


@given(st.lists(st.tuples(st.booleans(), st.lists(names, max_size=3, unique=True))))
def test_tokens_are_counted_and_requests_added_completely_or_not_at_all(
    steps: list[tuple[bool, list[str]]],
) -> None:
    queue: TokenQueue[str] = TokenQueue(len, max_tokens=10)
    expected: list[str] = []
    for remove, entries in steps:
        if remove:
            for entry in entries:
                queue.remove(entry)
            expected = [entry for entry in expected if entry not in entries]
        elif not set(entries) & set(expected):
            tokens = sum(map(len, entries))
            fits = not expected or not entries or sum(map(len, expected)) + tokens <= 10
            try:
                queue.add(entries)
            except ServiceError:
                assert not fits
            else:
                assert fits
                expected += entries
        assert list(queue.waiting()) == expected
        assert (len(queue), queue.tokens) == (len(expected), sum(map(len, expected)))


def test_retry_after_is_queued_tokens_divided_by_speed() -> None:
    queue = full_queue(90)
    assert retry_after(queue) == 1  # speed unknown
    queue.record(tokens=6, seconds=2.0)
    assert retry_after(queue) == 30
    queue.record(tokens=0, seconds=1000.0)
    assert retry_after(queue) == MAX_RETRY_SECONDS


def test_recent_work_dominates_the_speed() -> None:
    queue = full_queue(100)
    queue.record(tokens=1, seconds=50.0)
    for _ in range(3):
        queue.record(tokens=1000, seconds=20.0)
    seconds = retry_after(queue)
    assert seconds is not None
    assert seconds <= 3


def test_sequences_that_finish_together_share_their_time() -> None:
    queue = full_queue(40)
    queue.record(tokens=10, seconds=10.0)
    queue.record(tokens=30, seconds=0.0)
    assert retry_after(queue) == 10


@given(
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 4.0])] * 3),
    sizes=st.tuples(*[st.integers(1, 10)] * 3),
    burst=st.integers(1, 64),
)
def test_keys_get_shares_of_their_weights_in_any_order_of_arrival(
    weights: tuple[float, ...], sizes: tuple[int, ...], burst: int
) -> None:
    """At any time, two backlogged keys differ by at most one entry of each per weight."""
    entries = [[(key, number) for number in range(400)] for key in (0, 1, 2)]
    queue: TokenQueue[tuple[int, int]] = TokenQueue(
        lambda entry: sizes[entry[0]],
        max_tokens=10**6,
        key_of=lambda entry: str(entry[0]),
        weights={str(key): weight for key, weight in enumerate(weights)},
    )
    queue.add(entries[0])
    for _ in range(burst):  # no other key waits: neither debt nor credit
        queue.take(next(queue.waiting()))
    queue.add(entries[1] + entries[2])
    served = [0.0, 0.0, 0.0]
    for _ in range(100):
        entry = next(queue.waiting())
        queue.take(entry)
        served[entry[0]] += sizes[entry[0]] / weights[entry[0]]
        for first in range(3):
            for second in range(3):
                allowed = sizes[first] / weights[first] + sizes[second] / weights[second]
                assert abs(served[first] - served[second]) <= allowed + 1e-9


def test_full_queue_leaves_room_for_the_share_of_another_key() -> None:
    queue: TokenQueue[str] = TokenQueue(len, max_tokens=12, key_of=lambda entry: entry[0])
    queue.add(["a" * 6, "a" * 5])
    for fits in ("b" * 2, "b" * 4):
        queue.add([fits])
    for rejected in ("b", "a"):
        with pytest.raises(ServiceError):
            queue.add([rejected])
    assert queue.tokens_by_key == {"a": 11, "b": 6}
