"""The share of a completion's n-grams that only a teacher's prompt has, from the definition."""

from collections.abc import Sequence


def copied(
    completions: Sequence[bytes], teacher: Sequence[bytes], student: Sequence[bytes], size: int
) -> float | None:
    """Search every n-gram in every text; None without an n-gram."""
    grams = [text[at : at + size] for text in completions for at in range(len(text) - size + 1)]
    own = [
        gram
        for gram in grams
        if any(gram in text for text in teacher) and not any(gram in text for text in student)
    ]
    return len(own) / len(grams) if grams else None
