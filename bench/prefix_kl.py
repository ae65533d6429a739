"""Cost of prefix KL: preparation on published vocabularies, and share of a head's step.

    python -m bench.prefix_kl --json prefix_kl.json

Completions are pieces of 4 kB of Python's standard library; the teacher is a trigram model of its
tokens, top-64. Preparation runs on one core, in micro-batches of 8 completions, some 10,000 tokens,
as in training: equal contexts of different completions need one call of a tokenizer. ``new text``
is text after ``--known`` other completions: tables grow, and less of new text is new. ``stored`` is
the same of a second run, which has loaded the tables of the first one, ``known text`` the best of
three repetitions. The trigram model is far less certain than a language model, which names fewer
cells; with ``--certain``, its rows have the entropies of one. ``tests/losses/test_contract.py``
compares values with the reference implementation.
"""

import argparse
import gc
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.named_tokenizers import Side, pairs_of, short_names, side
from mopd_losses import (
    AlignedPair,
    CtkdConfig,
    DeviceProjection,
    Head,
    Loss,
    LossTerm,
    PrefixKlConfig,
    ProjectionCache,
    SftLoss,
    TopKDivergenceLoss,
    align,
    blockwise_head,
    build_loss,
    build_projection,
    label_targets,
)
from mopd_protocol import TeacherScore, TopKLogprobs
from tests.real_vocabularies import STANDARD_LIBRARY, python_sources, real

PAIRS = (
    "tekken:python_131k,python_131k:tekken,tekken:v3,v3:tekken,"
    "tekken:python_50k,python_50k:tekken,python_50k:v3,v3:python_50k,tekken:tekken_shuffled"
)
MEASURED = 24
IN_A_MICRO_BATCH = 8
COMPLETION_BYTES = 4_096
K = 64
ROWS, HIDDEN, ROWS_PER_BLOCK = 2_048, 512, 256

#: The share of a row that ``--certain`` leaves to the trigram model is ``u ** _EXPONENT``, with
#: uniform ``u``: below 0.002 of half of the rows, above 0.12 of a fifth. So the entropies are those
#: of Qwen3-8B on its samples, below 0.01 nats for half of the tokens and above 0.67 for a fifth
#: (arXiv 2506.01939, section 3).
_EXPONENT = 9.4

#: The share of a row with which a token may name a cell.
LIKELY = 1e-3
#: How certain a teacher is, and in words.
_CERTAINTY = {
    "teacher_entropy": "nats of entropy",
    "teacher_nats": "nats of the realised token",
    "likely_tokens": f"tokens of {LIKELY:.1%} and more",
}

Result = dict[str, Any]


class NGramTeacher:
    """Trigram model of a corpus, interpolated with bigrams and unigrams.

    Args:
        certain: give most of each row to the realised token, as a language model would.
    """

    def __init__(self, vocabulary: Side, texts: Sequence[str], *, certain: bool = False) -> None:
        self._certain = certain
        self._random = random.Random(7)
        self._after: list[dict[tuple[int, ...], Counter[int]]]
        self._after = [defaultdict(Counter), defaultdict(Counter)]
        frequent: Counter[int] = Counter()
        for ids in vocabulary.encoder.encode_batch(list(texts)):
            frequent.update(ids)
            for length in (1, 2):
                for at in range(length, len(ids)):
                    self._after[length - 1][tuple(ids[at - length : at])][ids[at]] += 1
        total = frequent.total()
        self._frequent = [(token, count / total) for token, count in frequent.most_common(2 * K)]

    def row(self, before: Sequence[int], own: int) -> dict[int, float]:
        """Probabilities of the likeliest ids and of ``own``, a little less than one in all."""
        masses: Counter[int] = Counter()  # type: ignore[type-var]
        left = 1.0
        for length in (2, 1):
            seen = self._after[length - 1].get(tuple(before[-length:]))
            if seen and len(before) >= length:
                for token, count in seen.most_common(K):
                    masses[token] += 0.7 * left * count / seen.total()  # type: ignore[assignment]
                left *= 0.3
        for token, share in self._frequent:
            masses[token] += left * share  # type: ignore[assignment]
        masses[own] += 1e-3  # type: ignore[assignment]
        total = sum(masses.values()) * 1.02
        return {token: mass / total for token, mass in masses.items()}

    def score(self, vocabulary: Side, text: str) -> TeacherScore:
        """A completion as a service would score it."""
        sequence = vocabulary.table.sequence(vocabulary.encoder.encode(text))
        written = sequence.token_ids.tolist()
        ids = np.full((len(written), K), -1, dtype=np.int32)
        logprobs = np.full((len(written), K), -np.inf)
        own = np.zeros(len(written), dtype=np.float32)
        for at, token in enumerate(written):
            row = self.row(written[max(0, at - 2) : at], token)
            if self._certain:
                share = self._random.random() ** _EXPONENT
                row = {other: share * mass for other, mass in row.items()}
                row[token] += 1.0 - share
            likely = sorted(row.items(), key=lambda entry: -entry[1])[:K]
            ids[at, : len(likely)] = [token_id for token_id, _ in likely]
            logprobs[at, : len(likely)] = np.log([mass for _, mass in likely])
            own[at] = np.log(row[token])
        tails = np.log(np.maximum(1.0 - np.exp(logprobs).sum(axis=1), 1e-9))
        return TeacherScore("teacher", sequence, TopKLogprobs(ids, logprobs, own, tails))


def completions(
    student: str, teacher: str, count: int, *, certain: bool = False
) -> list[AlignedPair]:
    """Pieces of texts that the teacher was not counted on."""
    sources = python_sources(STANDARD_LIBRARY)
    random.Random(1).shuffle(sources)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources[:400]]
    model = NGramTeacher(side(teacher), texts[:300], certain=certain)
    draw = random.Random(5)
    pieces: list[str] = []
    while len(pieces) < count:
        whole = draw.choice(texts[300:]).encode()
        if len(whole) > 2 * COMPLETION_BYTES:
            start = draw.randrange(len(whole) - COMPLETION_BYTES)
            pieces.append(whole[start : start + COMPLETION_BYTES].decode(errors="ignore"))
    return [compared(student, teacher, model, piece) for piece in pieces]


def compared(student: str, teacher: str, model: NGramTeacher, text: str) -> AlignedPair:
    """One completion."""
    sides = side(student), side(teacher)
    written = sides[0].table.sequence(sides[0].encoder.encode(text))
    score = model.score(sides[1], text)
    sampled = np.zeros(len(written), dtype=np.float32)
    return AlignedPair(written, sampled, score, align(written, score.completion), lookaheads=())


def measure_preparation(
    student: str, teacher: str, known: Sequence[int], folder: Path, *, certain: bool = False
) -> Result:
    """Milliseconds for 1,000 tokens, and what is set up once for a pair.

    Args:
        known: ascending numbers of completions after which new ones are measured.
    """
    pairs = completions(student, teacher, known[-1] + 2 * MEASURED, certain=certain)
    last = pairs[-MEASURED:]
    gc.collect()
    gc.freeze()  # the counts of the trigram model, which Python's collector would pass over
    sides = side(student), side(teacher)
    cache = ProjectionCache(folder)
    before = _resident_bytes()
    loss, set_up = _timed(lambda: build_loss(PrefixKlConfig(), *sides, cache=cache))
    set_up_bytes = _resident_bytes() - before
    first = preparation_ms(loss, pairs[:IN_A_MICRO_BATCH])
    new: dict[int, float] = {}
    done = IN_A_MICRO_BATCH
    for count in known:
        if count > done:
            preparation_ms(loss, pairs[done:count])
        done = count + MEASURED
        new[count] = preparation_ms(loss, pairs[count:done])
    again = min(preparation_ms(loss, pairs[done - MEASURED : done]) for _ in range(3))
    stored, load = _timed(lambda: build_loss(PrefixKlConfig(), *sides, cache=cache))
    return {
        "load_seconds": load,
        "stored_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "student": student,
        "teacher": teacher,
        **_certainty(pairs[:MEASURED]),
        "set_up_seconds": set_up,
        "set_up_bytes": set_up_bytes,
        "kept_bytes": _resident_bytes() - before,
        "first_ms": first,
        "new_text_ms": new,
        "stored_ms": preparation_ms(stored, last),
        "known_text_ms": again,
    }


def _certainty(pairs: Sequence[AlignedPair]) -> dict[str, float]:
    """Return means of the teacher's rows, see ``_CERTAINTY``."""
    rows = np.concatenate([pair.score.topk.logprobs for pair in pairs])
    masses = np.exp(rows)
    entropies = -np.where(masses > 0.0, masses * rows, 0.0).sum(axis=1)
    own = np.concatenate([pair.score.topk.token_logprobs for pair in pairs])
    likely = (masses >= LIKELY).sum(axis=1)
    return {
        key: float(np.mean(each))
        for key, each in zip(_CERTAINTY, (entropies, -own, likely), strict=True)
    }


def preparation_ms(loss: Loss, pairs: Sequence[AlignedPair]) -> float:
    """Milliseconds for 1,000 tokens of the student, over micro-batches as a trainer has them."""
    seconds = 0.0
    for start in range(0, len(pairs), IN_A_MICRO_BATCH):
        batch = pairs[start : start + IN_A_MICRO_BATCH]
        ends = np.cumsum([len(pair.student) for pair in batch])
        offsets = [0, *ends.tolist()[:-1]]
        seconds += _timed(lambda batch=batch, offsets=offsets: loss.targets(batch, offsets))[1]
    return 1e6 * seconds / sum(len(pair.student) for pair in pairs)


def measure_step(student: str, teacher: str, rounds: int) -> Result:
    """Milliseconds of a head's step with a loss and cross entropy, and of cross entropy only."""
    sides = real(student), real(teacher)
    width = sides[0].logit_width
    matrix = build_projection(sides[0].table, sides[1].table, sides[1].encoder, student_width=width)
    losses: dict[str, Loss] = {
        "prefix_kl": build_loss(PrefixKlConfig(), *sides),
        "ctkd": TopKDivergenceLoss(
            DeviceProjection.copy_of(matrix, torch.device("cpu")), CtkdConfig()
        ),
    }
    chosen: list[AlignedPair] = []
    offsets: list[int] = []
    rows = 0
    for comparison in completions(student, teacher, 8):
        if rows + len(comparison.student) <= ROWS:
            chosen.append(comparison)
            offsets.append(rows)
            rows += len(comparison.student)
    torch.manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = (torch.randn(width, HIDDEN) * 0.05).requires_grad_()
    head = Head(weight, torch.tensor(sides[0].table.real_ids(width)))
    labels = torch.tensor(np.concatenate([c.student.token_ids for c in chosen]), dtype=torch.int64)
    shares = torch.full((rows,), 1 / rows)
    supervised = LossTerm(SftLoss(), label_targets(labels), shares)
    steps = {"cross entropy (floor)": [supervised]}
    for name, loss in losses.items():
        steps[name] = [LossTerm(loss, loss.targets(chosen, offsets), shares), supervised]

    def step(terms: list[LossTerm]) -> Tensor:
        total, _ = blockwise_head(hidden, head, terms, rows_per_block=ROWS_PER_BLOCK)
        total.backward()
        return total

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, terms in steps.items():
            seconds[name].append(_timed(lambda terms=terms: step(terms))[1])
    return {
        "rows": rows,
        "vocabularies": [sides[0].table.size, sides[1].table.size],
        "ms": {name: min(durations[1:]) * 1e3 for name, durations in seconds.items()},
    }


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``work`` and CPU seconds, which other processes disturb the least."""
    started = time.process_time()
    return work(), time.process_time() - started


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmRSS"].split()[0]) * 1024


def completion_counts(listed: str) -> list[int]:
    """Parse numbers of completions; between two of them, measured ones are known, too."""
    counts = sorted(map(int, listed.split(",")))
    if np.diff([IN_A_MICRO_BATCH - MEASURED, *counts]).min() < MEASURED:
        raise argparse.ArgumentTypeError(
            f"found {listed!r}, expected {IN_A_MICRO_BATCH} or more, and {MEASURED} or more between"
        )
    return counts


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument(
        "--known",
        type=completion_counts,
        default=[32, 256],
        metavar="N,…",
        help="completions before new text (default: 32,256)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--pairs", default=PAIRS, metavar="STUDENT:TEACHER,…", help="tokenizers: names, or files"
    )
    parser.add_argument("--preparation-only", action="store_true", help="no step of the head")
    parser.add_argument(
        "--certain", action="store_true", help="a teacher as certain as a language model"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    prepared: list[Result] = []
    for student, teacher in pairs_of(parser, options.pairs):
        with TemporaryDirectory() as folder:
            prepared.append(
                measure_preparation(
                    student, teacher, options.known, Path(folder), certain=options.certain
                )
            )
    table = Table(
        title="preparation, milliseconds for 1,000 tokens on one core",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("student\nteacher", no_wrap=True)
    for heading in (
        "set-up\ns",
        "load\ns",
        "memory\nMB",
        "disk\nMB",
        "first\ntext",
        *(f"after\n{count:,}" for count in options.known),
        "stored\ntext",
        "known\ntext",
    ):
        table.add_column(heading, justify="right")
    shorts = short_names(row[key] for row in prepared for key in ("student", "teacher"))
    for row in prepared:
        table.add_row(
            f"{shorts[row['student']]}\n{shorts[row['teacher']]}",
            f"{row['set_up_seconds']:.1f}",
            f"{row['load_seconds']:.1f}",
            f"{row['set_up_bytes'] / 1e6:,.0f}",
            f"{row['stored_bytes'] / 1e6:,.1f}",
            f"{row['first_ms']:,.0f}",
            *(f"{milliseconds:,.0f}" for milliseconds in row["new_text_ms"].values()),
            *(f"{row[key]:,.0f}" for key in ("stored_ms", "known_text_ms")),
        )
    console.print(table)
    means = {key: float(np.mean([row[key] for row in prepared])) for key in _CERTAINTY}
    shown = ", ".join(f"{means[key]:.1f} {text}" for key, text in _CERTAINTY.items())
    console.print(f"a row of the teacher: {shown}", highlight=False)
    report: Result = {"preparation": prepared, "torch": torch.__version__}
    if not options.preparation_only:
        report["step"] = measure_step("v3", "tekken", options.rounds)
        floor = report["step"]["ms"]["cross entropy (floor)"]
        for name, milliseconds in report["step"]["ms"].items():
            console.print(f"{name}: {milliseconds:,.0f} ms, {milliseconds / floor:.2f} × floor")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
