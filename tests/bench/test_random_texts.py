"""Random sets of texts: several, different, and the same for one seed."""

from bench.random_texts import RandomTexts

WORDS = [f" {stem}{end}" for stem in ("repr", "stat") for end in "abcdef"]


def test_sets_have_several_texts_and_repeat_with_the_seed() -> None:
    first, second, other = (RandomTexts(WORDS, seed) for seed in (0, 0, 1))
    sets = [first.next() for _ in range(50)]
    assert all(1 < len(set(texts)) == len(texts) and all(texts) for texts in sets)
    assert sets == [second.next() for _ in range(50)]
    assert sets != [other.next() for _ in range(50)]
    drawn = " ".join(text for texts in sets for text in texts)
    assert all(part in drawn for part in ("n = ", "import os", "a  ", " repr"))
