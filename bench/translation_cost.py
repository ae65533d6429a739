"""Processor time of translating scores, and the extra rows that it requests.

    python -m bench.translation_cost --pairs tekken:v3 --known 32

Texts and teacher are those of ``bench.prefix_kl --certain``: pieces of 4 kB of Python's standard
library, and a trigram model with the entropies of a language model, top-64. Translated are eight
completions at a time, without extra rows: those that would be requested are counted.
"""

import argparse
import time

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.named_tokenizers import pairs_of, short_names, side
from bench.prefix_kl import IN_A_MICRO_BATCH, completions
from mopd_losses import Translator


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default="tekken:v3", metavar="STUDENT:TEACHER,…")
    parser.add_argument("--known", type=int, default=32, help="completions translated before")
    options = parser.parse_args()
    pairs = pairs_of(parser, options.pairs)
    names = short_names(name for pair in pairs for name in pair)
    columns = ("first", "new", "seen", "extra rows", "named mass")
    table = Table("student", "teacher", *columns, box=SIMPLE, title="ms per 1,000 tokens")
    for student, teacher in pairs:
        figures = _measure(student, teacher, options.known)
        shown = [f"{figure:,.0f}" for figure in figures[:4]]
        table.add_row(names[student], names[teacher], *shown, f"{figures[4]:.2f}")
    Console().print(table)


def _measure(student: str, teacher: str, known: int) -> tuple[float, ...]:
    """Return milliseconds for 1,000 tokens of the first text, of new text and of text seen before,
    extra rows for 1,000 tokens, and the named mass without these."""
    own, other = side(student), side(teacher)
    translator = Translator(own.table, own.encoder, other.table, other.encoder)
    samples = completions(student, teacher, known + IN_A_MICRO_BATCH, certain=True)
    batches = [
        samples[start : start + IN_A_MICRO_BATCH]
        for start in range(0, len(samples), IN_A_MICRO_BATCH)
    ]
    milliseconds: list[float] = []
    for batch in [*batches, batches[-1]]:
        started = time.process_time()
        pending = translator.begin([pair.student for pair in batch], [pair.score for pair in batch])
        translations = pending.translations()
        tokens = sum(len(pair.student) for pair in batch)
        milliseconds.append(1e6 * (time.process_time() - started) / tokens)
    rows = 1000 * len(pending.extra_rows) / tokens
    mass = np.concatenate([each.coverage.named_mass for each in translations]).mean()
    return milliseconds[0], milliseconds[-2], milliseconds[-1], rows, float(mass)


if __name__ == "__main__":
    main()
