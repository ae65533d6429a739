"""False loss of one byte model through two tokenizers that merge.

    python -m bench.byte_models --vocabularies 12 --letters ab --longest 6

A Markov chain over a few letters, cut at a longest text, so that all texts can be listed. Its exact
token rows through two BPE tokenizers, each trained on texts of another chain, are a student and a
teacher that agree about every text: a divergence should be zero, in expectation over the texts, and
so with all lookaheads. The tokenizers merge overlapping pairs, and do not match the longest token.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.losses.prefix_pairs import (
    Pair,
    Tongue,
    compared,
    model_rows,
    rows_of,
    with_lookaheads,
)
from tests.reference.text_model import TokenModel, markov_texts

#: Log-probabilities of the student are clamped here: -inf has no gradient.
LOWEST = -60


def main() -> None:
    """Print nats per token of random pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, default=12, metavar="N", help="pairs")
    parser.add_argument("--letters", default="ab", help="alphabet of the texts")
    parser.add_argument("--longest", type=int, default=6, help="letters of the longest text")
    parser.add_argument("--merges", type=int, default=6, help="of each tokenizer")
    parser.add_argument("--top-k", type=int, default=16, help="of the teacher's rows")
    parser.add_argument("--no-bounds", action="store_true", help="prefix KL with `bounds: false`")
    options = parser.parse_args()
    table = Table("pair", "student's tokens", "teacher's tokens", "nats a token")
    values: list[float] = []
    for seed in range(options.vocabularies):
        pair = merging_pair(seed, options.letters, options.merges)
        texts = markov_texts(options.letters, options.longest, seed)
        bounds = not options.no_bounds
        values.append(false_loss(pair, texts, top_k=options.top_k, bounds=bounds))
        tokens = (" ".join(merged_tokens(side)) for side in (pair.student, pair.teacher))
        table.add_row(str(seed), *tokens, f"{values[-1]:.4f}")
    table.add_row("mean", "", "", f"{statistics.mean(values):.4f}")
    table.add_row("highest", "", "", f"{max(values):.4f}")
    Console().print(table)


def merging_pair(seed: int, letters: str, merges: int) -> Pair:
    """Two tokenizers, trained on separate byte models."""
    sides = [
        _trained(markov_texts(letters, 6, 100 * seed + number), merges, end)
        for number, end in ((1, "<over>"), (2, "<stop>"))
    ]
    return Pair(*sides)


def merged_tokens(side: Tongue) -> list[str]:
    """The tokens of several letters."""
    return [b.decode() for b in side.table.all_bytes if len(b) > 1]


def false_loss(
    pair: Pair,
    texts: Mapping[str, float],
    *,
    top_k: int,
    lowest: float = LOWEST,
    bounds: bool = True,
) -> float:
    """Prefix KL in nats per student token, in expectation over the texts.

    Args:
        lowest: nats of the student's tokens that continue no text.
        bounds: see ``PrefixKlConfig``.
    """
    student = TokenModel(dict(texts), pair.student.tokenize)
    teacher = TokenModel(dict(texts), pair.teacher.tokenize)
    total = tokens = 0.0
    for text, mass in texts.items():
        ids = pair.student.ids(student.written[text]), pair.teacher.ids(teacher.written[text])
        rows = model_rows(pair.teacher, teacher, text)
        comparison = compared(pair, *ids, rows, k=top_k)
        comparison = with_lookaheads(pair, comparison, rows_of(pair.teacher, teacher))
        targets = pair.targets([comparison], bounds=bounds)
        logits = model_rows(pair.student, student, text).clamp_min(lowest)
        total += mass * pair.value(logits, targets).per_token.sum().item()
        tokens += mass * len(ids[0])
    return total / tokens


def merging_tokenizer(tokens: Sequence[str], end: str) -> Tongue:
    """A tokenizer of bytes that merges to tokens, in this order: each of two earlier ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {*alphabet}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges.append(next(cut for cut in cuts if known.issuperset(cut)))
        known.add(token)
    vocabulary = {token: number for number, token in enumerate([*alphabet, *tokens])}
    return Tongue.ended(_of_bytes(models.BPE(vocabulary, merges)), end)


def _trained(texts: Mapping[str, float], merges: int, end: str) -> Tongue:
    tokenizer = _of_bytes(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    repeated = (text for text, mass in texts.items() for _ in range(round(5_000 * mass)))
    tokenizer.train_from_iterator(repeated, trainer)
    return Tongue.ended(tokenizer, end)


def _of_bytes(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    main()
