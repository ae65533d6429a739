"""Batches of sequences of similar length within a token budget."""

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group the indices of ``lengths`` into batches.

    A batch has at most ``max_tokens`` tokens with padding, unless it is a single longer sequence;
    no member is shorter than half of the longest, so that at most half of the work is padding.
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if buckets:
            longest = lengths[buckets[-1][0]]
            fits = longest * (len(buckets[-1]) + 1) <= max_tokens
            if fits and 2 * lengths[index] >= longest:
                buckets[-1].append(index)
                continue
        buckets.append([index])
    return buckets
