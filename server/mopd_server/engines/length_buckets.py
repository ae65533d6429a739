"""Which sequences go through the model together: similar lengths, within a token budget."""

from collections.abc import Sequence


def length_buckets(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of ``lengths``, grouped so that padding a group to its longest is affordable.

    Every group has at most ``max_tokens`` tokens with padding, except a single sequence that is
    longer by itself, and no member is shorter than half of the longest, so at most half of the
    work is padding.
    """
    buckets: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda p: lengths[p], reverse=True):
        if buckets:
            longest = lengths[buckets[-1][0]]
            affordable = longest * (len(buckets[-1]) + 1) <= max_tokens
            if affordable and 2 * lengths[position] >= longest:
                buckets[-1].append(position)
                continue
        buckets.append([position])
    return buckets
