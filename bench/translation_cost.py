"""Processor time of translating scores, and the extra rows that it requests.

    python -m bench.translation_cost --pairs tekken:v3 --known 32
    python -m bench.translation_cost --model FOLDER --texts texts.json --pairs tekken:FOLDER

Texts and teacher are those of ``bench.prefix_kl --certain``: pieces of 4 kB of Python's standard
library, and a trigram model with the entropies of a language model, top-64. With ``--model``, the
teacher is a language model with a chat template, and the texts are its own completions of short
prompts, which the file keeps. Translated are eight completions at a time, without extra rows: those
that would be requested are counted. ``likely`` are the teacher's tokens of 0.01 % and more in a
row, and ``teacher`` is the time of the model's scores on one thread.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.model_teacher import ModelTeacher
from bench.named_tokenizers import pairs_of, short_names, side
from bench.prefix_kl import IN_A_MICRO_BATCH, completions
from mopd_losses import Translator
from mopd_protocol import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence

#: Least probability of a likely token.
_LIKELY = 1e-4

_COLUMNS = "first", "new", "seen", "teacher", "likely", "extra rows", "named mass"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default="tekken:v3", metavar="STUDENT:TEACHER,…")
    parser.add_argument("--known", type=int, default=32, help="completions translated before")
    parser.add_argument("--model", metavar="FOLDER", help="the teacher of every pair")
    parser.add_argument("--texts", type=Path, help="the model's completions, a JSON file")
    options = parser.parse_args()
    if bool(options.model) != bool(options.texts):
        parser.error("--model and --texts: found one of them, expected both or none")
    pairs = pairs_of(parser, options.pairs)
    names = short_names(name for pair in pairs for name in pair)
    count = options.known + IN_A_MICRO_BATCH
    model = ModelTeacher(options.model) if options.model else None
    texts = model.texts(options.texts, count)[:count] if model else ()
    scores = [(text, model.score(prompt, text)) for prompt, text in texts] if model else ()
    table = Table("student", "teacher", *_COLUMNS, box=SIMPLE, title="ms per 1,000 tokens")
    for student, teacher in pairs:
        own = side(student)
        samples = [(own.table.sequence(own.encoder.encode(text)), score) for text, score in scores]
        if model is None:
            pairs_of_texts = completions(student, teacher, count, certain=True)
            samples = [(each.student, each.score) for each in pairs_of_texts]
        figures = _measure(student, teacher, samples)
        tokens = sum(len(completion) for completion, _ in samples)
        figures.insert(3, 1e6 * model.seconds / tokens if model else float("nan"))
        shown = [f"{figure:,.0f}" for figure in figures[:-1]]
        table.add_row(names[student], names[teacher], *shown, f"{figures[-1]:.4f}")
    Console(width=max(Console().width, 100)).print(table)


def _measure(
    student: str, teacher: str, samples: Sequence[tuple[TokenSequence, TeacherScore]]
) -> list[float]:
    """Return milliseconds for 1,000 tokens of the first text, of new text and of text seen before,
    likely tokens in a row, extra rows for 1,000 tokens, and the named mass without these."""
    own, other = side(student), side(teacher)
    translator = Translator(own.table, own.encoder, other.table, other.encoder)
    batches = [
        samples[start : start + IN_A_MICRO_BATCH]
        for start in range(0, len(samples), IN_A_MICRO_BATCH)
    ]
    milliseconds: list[float] = []
    for batch in [*batches, batches[-1]]:
        started = time.process_time()
        pending = translator.begin(*zip(*batch, strict=True))
        translations = pending.translations()
        tokens = sum(len(completion) for completion, _ in batch)
        milliseconds.append(1e6 * (time.process_time() - started) / tokens)
    rows = 1000 * len(pending.extra_rows) / tokens
    mass = np.concatenate([each.coverage.named_mass for each in translations]).mean()
    entries = np.concatenate([score.topk.logprobs for _, score in samples])
    likely = (entries >= np.log(_LIKELY)).sum(axis=1).mean()
    return [milliseconds[0], *milliseconds[-2:], float(likely), rows, float(mass)]


if __name__ == "__main__":
    main()
