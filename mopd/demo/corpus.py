"""Training text of the demo's tokenizers."""

from random import Random

from mopd.demo.tasks import NUMBERS, WORDS, WORDS_PER_LIST

SENTENCES = (
    "the student writes an answer and two teachers read it",
    "every teacher has learned one thing well and nothing else",
    "nobody tells the student what the right answer would have been",
    "the words of a list are read from the end to the beginning",
    "two numbers below a hundred are added in the head",
    "the teachers do not share a vocabulary with the student",
    "where the same bytes are spelled the probabilities can be compared",
    "a small model learns quickly and forgets quickly as well",
    "please reverse the list of words and add the numbers",
    "user assistant user assistant user assistant",
    "in the garden a rabbit sat under the walnut tree near the bridge",
)

#: Number of word lists, and of sums, in a corpus.
LISTS = 400


def demo_corpus(seed: int) -> list[str]:
    """Return lines of prompts and completions, and sentences; a seed decides the merge order."""
    random = Random(seed)
    lines: list[str] = list(SENTENCES)
    for _ in range(LISTS):
        words = random.sample(WORDS, WORDS_PER_LIST)
        lines += [f"reverse: {' '.join(words)}", " ".join(words[::-1])]
        first, second = random.choice(NUMBERS), random.choice(NUMBERS)
        lines += [f"{first} + {second} =", str(first + second)]
    return lines
