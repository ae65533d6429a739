"""The queue that is bounded by tokens, and the time after which it says to come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_server.scoring.token_queue import LONGEST_RETRY_SECONDS, TokenQueue
from mopd_server.service_error import ServiceError

#: Entries are names of ten letters at most; a name has as many tokens as letters.
names = st.text(alphabet="ab", min_size=1, max_size=10)


def queue(max_tokens: int = 10) -> TokenQueue[str]:
    return TokenQueue(len, max_tokens=max_tokens)


def retry_after(waiting: TokenQueue[str]) -> int:
    """Seconds that one entry too many is told."""
    with pytest.raises(ServiceError) as raised:
        waiting.enter(["x" * 1000])
    assert raised.value.http_status == 429
    assert raised.value.retry_after_seconds is not None
    return raised.value.retry_after_seconds


@given(st.lists(st.tuples(st.booleans(), st.lists(names, max_size=3, unique=True))))
def test_it_counts_what_is_in_it_and_takes_a_request_whole_or_not_at_all(
    steps: list[tuple[bool, list[str]]],
) -> None:
    waiting, inside = queue(), list[str]()
    for leave, entries in steps:
        if leave:
            for entry in entries:
                waiting.leave(entry)
                inside = [other for other in inside if other != entry]
        elif not set(entries) & set(inside):
            tokens = sum(map(len, entries))
            fits = not inside or sum(map(len, inside)) + tokens <= 10
            try:
                waiting.enter(entries)
            except ServiceError:
                assert not fits
            else:
                assert fits
                inside += entries
        assert list(waiting) == inside
        assert (len(waiting), waiting.tokens) == (len(inside), sum(map(len, inside)))


def test_the_wait_is_what_is_in_the_queue_divided_by_the_speed() -> None:
    waiting = queue(max_tokens=100)
    waiting.enter(["x" * 90])
    assert retry_after(waiting) == 1  # nothing is known yet
    waiting.worked(tokens=6, seconds=2.0)
    assert retry_after(waiting) == 30
    waiting.worked(tokens=0, seconds=1000.0)
    assert retry_after(waiting) == LONGEST_RETRY_SECONDS


def test_recent_work_counts_most() -> None:
    waiting = queue(max_tokens=100)
    waiting.enter(["x" * 100])
    waiting.worked(tokens=1, seconds=50.0)  # a slow start
    for _ in range(3):
        waiting.worked(tokens=1000, seconds=20.0)
    assert retry_after(waiting) <= 3


def test_entries_that_end_together_share_the_time() -> None:
    waiting = queue(max_tokens=100)
    waiting.enter(["x" * 40])
    waiting.worked(tokens=10, seconds=10.0)
    waiting.worked(tokens=30, seconds=0.0)
    assert retry_after(waiting) == 10
