"""Tests of the batches of similar lengths within a budget."""

from hypothesis import given
from hypothesis import strategies as st

from mopd_server.engines.length_buckets import length_buckets


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_each_sequence_is_in_one_bucket_within_the_budget_and_with_little_padding(
    lengths: list[int], max_tokens: int
) -> None:
    buckets = length_buckets(lengths, max_tokens)
    indices = sorted(index for bucket in buckets for index in bucket)
    assert indices == list(range(len(lengths)))
    for bucket in buckets:
        members = [lengths[index] for index in bucket]
        assert len(bucket) == 1 or max(members) * len(members) <= max_tokens
        assert 2 * min(members) >= max(members)


def test_sequences_within_the_budget_share_a_bucket() -> None:
    assert length_buckets([8, 8, 7, 8], 32) == [[0, 1, 3, 2]]
    assert len(length_buckets([8, 8, 7, 8], 31)) == 2
