"""Buckets of similar lengths within a budget."""

from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.length_buckets import length_buckets


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_every_sequence_is_in_one_bucket_that_fits_and_is_mostly_no_padding(
    lengths: list[int], max_tokens: int
) -> None:
    buckets = length_buckets(lengths, max_tokens)
    assert sorted(position for bucket in buckets for position in bucket) == list(
        range(len(lengths))
    )
    for bucket in buckets:
        members = [lengths[position] for position in bucket]
        assert len(bucket) == 1 or max(members) * len(members) <= max_tokens
        assert 2 * min(members) >= max(members)


def test_what_fits_goes_together() -> None:
    assert length_buckets([8, 8, 7, 8], 32) == [[0, 1, 3, 2]]
    assert len(length_buckets([8, 8, 7, 8], 31)) == 2
