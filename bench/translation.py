"""Errors of translated scores: two models of the same texts through two tokenizers.

    python -m bench.translation --pairs tekken:v3,student.json:teacher.json
    python -m bench.translation --texts 'Staat|Stadt|Straße' --verbose
    python -m bench.translation --random 20 --seed 1
    python -m bench.translation --byte-models 12
    python -m bench.translation --words

The teacher's exact rows of each text are translated into the student's ids, with all extra rows
that the translation requests, and compared with the student's exact rows, which are the truth. The
sets are those of ``bench.several_texts``, or byte models, or words of which the teacher strongly
prefers one and the student generated another one. The false loss is that of the student with the
true probabilities under trl's server trainer with ``beta=0``.
"""

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from statistics import mean

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import byte_models
from bench.named_tokenizers import pairs_of, short_names
from bench.several_texts import LOWEST, add_text_options, named_pair, text_sets
from mopd.demo.tasks import WORDS
from mopd_losses import Translation, Translator
from tests.losses.prefix_pairs import Pair
from tests.reference.text_model import markov_texts
from tests.reference.translation import SharedTexts, Translates

#: Largest error of a named probability, and nats a token of false loss.
_EXACT, _SMALL, _BARELY = 1e-4, 0.01, 0.05

#: Probability of the word that the teacher prefers, and number of words.
_PREFERRED, _WORDS = 0.9, 200

_COLUMNS = "nats", "error", "realised", "mass", "lost", "at start", "reported", "silent", "rows"

#: Kinds of texts that the summary lists.
_LISTED = 30

#: Least width of the table.
_WIDTH = 110

#: Least letters of words of Python's documentation.
_LETTERS = 5

#: Entries of the teacher's rows; byte models have complete ones.
_TEACHER_TOP_K = 64


@dataclass(frozen=True)
class Named:
    """A probability of the translation."""

    token: str
    translated: float
    true: float

    @property
    def error(self) -> float:
        return abs(self.translated - self.true)


@dataclass(frozen=True)
class Position:
    """One student token of a completion."""

    before: str  # text before the token
    realised: Named | None  # None without signal
    worst: Named | None  # the named token with the largest error; None if nothing is named
    likeliest: Named  # the likeliest token in truth; NaN if it has no name
    weight: float  # probability of the text
    nats: float  # false loss
    named_mass: float
    reported_lost: bool  # ``lost_top1`` of the coverage

    @property
    def lost(self) -> bool:
        """True if the token that is likeliest in truth has no name."""
        return math.isnan(self.likeliest.translated)


@dataclass(frozen=True)
class Figures:
    """Figures of one set of texts; means are in expectation over the texts."""

    nats: float  # a student token
    named_error: float  # largest
    realised_error: float  # largest
    named_mass: float
    lost_top1: float  # share of positions at which the truth's likeliest token has no name
    lost_at_start: float  # share of texts, at the first token
    reported_lost: float  # share of positions by the coverage
    without_signal: float
    extra_rows: float  # a completion
    rows_outside: int  # extra rows after tokens that begin no text

    @classmethod
    def of(cls, positions: Sequence[Position], extra_rows: float, rows_outside: int) -> "Figures":
        def expected(values: Iterable[float]) -> float:
            pairs = zip(values, positions, strict=True)
            return math.fsum(value * at.weight for value, at in pairs) / total

        total = math.fsum(at.weight for at in positions)
        return cls(
            nats=expected(at.nats for at in positions),
            named_error=max((at.worst.error for at in positions if at.worst), default=0.0),
            realised_error=max((at.realised.error for at in positions if at.realised), default=0.0),
            named_mass=expected(at.named_mass for at in positions),
            lost_top1=expected(at.lost for at in positions),
            lost_at_start=cls._lost_at_start(positions),
            reported_lost=expected(at.reported_lost for at in positions),
            without_signal=expected(at.realised is None for at in positions),
            extra_rows=extra_rows,
            rows_outside=rows_outside,
        )

    @staticmethod
    def _lost_at_start(positions: Sequence[Position]) -> float:
        weights = [(at.weight, at.weight * at.lost) for at in positions if not at.before]
        return math.fsum(lost for _, lost in weights) / math.fsum(weight for weight, _ in weights)


@dataclass(frozen=True)
class Measured:
    """One set of texts."""

    name: str
    shown: tuple[str, str, str]  # tokenizers and kind
    positions: list[Position]
    figures: Figures


def main() -> None:
    """Print and store a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_text_options(parser)
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--byte-models", type=int, metavar="N", help="N byte models instead")
    others.add_argument("--words", action="store_true", help="single words instead")
    parser.add_argument("--letters", default="ab", help="alphabet of the byte models")
    parser.add_argument("--longest", type=int, default=6, help="letters of their longest text")
    parser.add_argument("--merges", type=int, default=6, help="of each of their tokenizers")
    parser.add_argument("--top-k", type=int, default=16, help="entries that the loss uses")
    parser.add_argument(
        "--teacher-top-k",
        type=int,
        help="of the teacher's rows (default: 64, complete for byte models)",
    )
    parser.add_argument("--verbose", action="store_true", help="list positions with an error")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures go")
    options = parser.parse_args()
    console = Console(width=max(Console().width, _WIDTH))
    table = Table("student", "teacher", "texts", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    results: list[Measured] = []
    if options.words:
        measured = _words(parser, options)
    elif options.byte_models:
        measured = _byte_models(options)
    else:
        measured = _several_texts(parser, options)
    for each in measured:
        results.append(each)
        table.add_row(*each.shown, *_shown(each.figures))
        if options.verbose:
            for line in _listed(each):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(_summary(results), highlight=False, soft_wrap=True)
    if options.json:
        values = {each.name: asdict(each.figures) for each in results}
        options.json.write_text(json.dumps(values, indent=1))


def _several_texts(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> Iterator[Measured]:
    for sets in text_sets(parser, options):
        pair = named_pair(sets.student, sets.teacher)
        masses = dict.fromkeys(sets.texts, 1 / len(sets.texts))
        shared = SharedTexts(pair, masses, options.teacher_top_k or _TEACHER_TOP_K)
        measured = measure(translator_of(pair), shared, masses, LOWEST, options.top_k)
        yield Measured(sets.name, sets.shown, *measured)


def _byte_models(options: argparse.Namespace) -> Iterator[Measured]:
    for seed in range(options.seed, options.seed + options.byte_models):
        pair = byte_models.merging_pair(seed, options.letters, options.merges)
        masses = markov_texts(options.letters, options.longest, seed)
        shared = SharedTexts(pair, masses, options.teacher_top_k)
        width = pair.student.logit_width
        measured = measure(translator_of(pair), shared, masses, byte_models.LOWEST, width)
        tokens = [
            " ".join(byte_models.merged_tokens(each)) for each in (pair.student, pair.teacher)
        ]
        yield Measured(f"byte model {seed}", (tokens[0], tokens[1], str(seed)), *measured)


def _words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[Measured]:
    pairs = pairs_of(parser, options.pairs)
    shorts = short_names(chain(*pairs))
    frequencies, draw = word_frequencies(), Random(options.seed)
    for (student, teacher), space in product(pairs, ("", " ")):
        pair = named_pair(student, teacher)
        parts: list[tuple[list[Position], Figures]] = []
        for preferred in frequencies:
            others = {word: count for word, count in frequencies.items() if word != preferred}
            scale = (1 - _PREFERRED) / sum(others.values())
            masses = {space + word: count * scale for word, count in others.items()}
            masses[space + preferred] = _PREFERRED
            [other] = draw.choices([*others], [*others.values()])
            shared = SharedTexts(pair, masses, options.teacher_top_k or _TEACHER_TOP_K)
            completions = {space + other: 1.0}
            parts.append(measure(translator_of(pair), shared, completions, LOWEST, options.top_k))
        positions = [at for each, _ in parts for at in each]
        extra_rows = mean(figures.extra_rows for _, figures in parts)
        outside = sum(figures.rows_outside for _, figures in parts)
        kind = "words behind a space" if space else "words"
        yield Measured(
            f"{student}:{teacher}:{kind}",
            (shorts[student], shorts[teacher], kind),
            positions,
            Figures.of(positions, extra_rows, outside),
        )


def word_frequencies() -> dict[str, int]:
    """Word -> count, of the demo's words and the most frequent ones of Python's documentation."""
    words = re.findall(rf"\b[a-z]{{{_LETTERS},}}\b", " ".join(topics.values()))
    return dict.fromkeys(WORDS, 1) | dict(Counter(words).most_common(_WORDS - len(WORDS)))


@cache
def translator_of(pair: Pair) -> Translator:
    """The translator between the tokenizers of a pair."""
    student, teacher = pair.student, pair.teacher
    return Translator(student.table, student.encoder, teacher.table, teacher.encoder)


def measure(
    translator: Translates,
    shared: SharedTexts,
    weights: Mapping[str, float],
    lowest: float,
    top_k: int,
) -> tuple[list[Position], Figures]:
    """Translate completions and compare each position with the truth.

    Args:
        weights: completion -> its weight in means.
        lowest: nats of the student's tokens that continue no text.
        top_k: entries that the loss uses.
    """
    completions = [shared.completion(text) for text in weights]
    translations, known = shared.translated(translator, completions)
    positions: list[Position] = []
    table, tongue = shared.pair.student.table, shared.pair.student
    real = torch.from_numpy(table.real_ids(tongue.logit_width))
    each = zip(completions, translations, weights.values(), strict=True)
    for completion, translation, weight in each:
        truth = shared.truth(completion)
        student = truth.clamp_min(lowest).masked_fill(~real, -torch.inf).log_softmax(dim=1)
        for row, token in enumerate(completion.token_ids.tolist()):
            named = _named(translation, row)
            coverage = translation.coverage

            def compared(
                token: int, logprob: float | None, row: int = row, truth: Tensor = truth
            ) -> Named:
                spelled = "end" if token == tongue.end else repr(table.bytes_of(token))[1:]
                translated = math.nan if logprob is None else math.exp(logprob)
                return Named(spelled, translated, truth[row, token].exp().item())

            entries = [compared(*entry) for entry in named.items()]
            likeliest = int(truth[row].argmax())
            realised = translation.topk.token_logprobs[row].item()
            has_signal = bool(coverage.has_signal[row])
            support = dict(named)
            if has_signal and realised > -math.inf:
                support.setdefault(token, realised)  # an entry of every response
            positions.append(
                Position(
                    before=completion.text[: completion.byte_starts[row]].decode(errors="replace"),
                    realised=compared(token, realised) if has_signal else None,
                    worst=max(entries, key=lambda entry: entry.error, default=None),
                    likeliest=compared(likeliest, support.get(likeliest)),
                    weight=weight,
                    nats=server_trainer_loss(support, student[row], top_k),
                    named_mass=math.fsum(entry.translated for entry in entries),
                    reported_lost=bool(coverage.lost_top1[row]),
                )
            )
    return positions, Figures.of(positions, len(known) / len(completions), shared.rows_outside)


def _named(translation: Translation, row: int) -> dict[int, float]:
    topk = translation.topk
    entries = zip(topk.ids[row].tolist(), topk.logprobs[row].tolist(), strict=True)
    return {token: logprob for token, logprob in entries if token >= 0}


def server_trainer_loss(support: Mapping[int, float], student: Tensor, top_k: int) -> float:
    """Forward KL of one position, as trl 1.16.0's server trainer computes it with ``beta=0``.

    The client keeps the ``top_k`` entries of the highest rank; all other mass of either side is
    one more entry, and its logarithm is at least that of 1e-7.

    Args:
        support: token id -> the teacher's log-probability, of all entries of a response.
        student: [width], log-probabilities.
    """
    ids = sorted(support, key=lambda token: -support[token])[:top_k]
    teacher = torch.tensor([support[token] for token in ids], dtype=torch.float64)

    def with_tail(logprobs: Tensor) -> Tensor:
        total = logprobs.logsumexp(dim=0).clamp_max(-1e-7)
        return torch.cat([logprobs, (-total.expm1()).log()[None]])

    target, prediction = with_tail(teacher), with_tail(student[ids])
    return (target.exp() * (target - prediction)).sum().item()


def _shown(figures: Figures) -> Iterator[str]:
    yield f"{figures.nats:.4f}"
    yield from (f"{error:.5f}" for error in (figures.named_error, figures.realised_error))
    yield from (f"{share:.3f}" for share in (figures.named_mass, figures.lost_top1))
    shares = figures.lost_at_start, figures.reported_lost, figures.without_signal
    yield from (f"{share:.3f}" for share in shares)
    yield f"{figures.extra_rows:.1f}" + "*" * bool(figures.rows_outside)


def _listed(measured: Measured) -> Iterator[str]:
    for at in measured.positions:
        notes = [
            f"{name} {each.token} {each.translated:.6f}, true {each.true:.6f}"
            for name, each in (("entry", at.worst), ("realised", at.realised))
            if each and each.error > _EXACT
        ]
        if at.lost:
            notes.append(f"no name for {at.likeliest.token}, true {at.likeliest.true:.6f}")
        if at.nats > _SMALL:
            notes.append(f"{at.nats:.4f} nats")
        if notes:
            behind = f"{' '.join(measured.shown[:2])}: behind {at.before!r}"
            yield "; ".join([behind, *notes])


def _summary(results: Sequence[Measured]) -> str:
    figures = [each.figures for each in results]
    nats = [each.nats for each in figures]
    shares = [mean(value <= bar for value in nats) for bar in (_SMALL, _BARELY)]
    inexact = [each for each in results if each.figures.named_error > _EXACT]
    above = [each for each in results if each.figures.nats > _SMALL]
    lines = [
        f"{len(results)} sets: {shares[0]:.1%} at most {_SMALL}, {shares[1]:.1%} at most "
        f"{_BARELY} nats a token; mean {mean(nats):.4f}, at most {max(nats):.4f}",
        f"largest error of an entry {max(each.named_error for each in figures):.6f}, of a realised "
        f"token {max(each.realised_error for each in figures):.6f}",
        f"named mass {mean(each.named_mass for each in figures):.4f}, likeliest token lost "
        f"{mean(each.lost_top1 for each in figures):.2%} (at the first token "
        f"{mean(each.lost_at_start for each in figures):.2%}, reported "
        f"{mean(each.reported_lost for each in figures):.2%}), without signal "
        f"{mean(each.without_signal for each in figures):.2%}, "
        f"{mean(each.extra_rows for each in figures):.1f} extra rows a completion",
        _kinds(f"false loss above {_SMALL}", above),
        _kinds(f"an entry wrong by more than {_EXACT}", inexact),
    ]
    outside = sum(each.rows_outside for each in figures)
    if outside:
        lines.append(f"{outside} extra rows (*) after tokens that begin no text")
    return "\n".join(lines)


def _kinds(fault: str, results: Sequence[Measured]) -> str:
    kinds = Counter(each.shown[2] for each in results).most_common(_LISTED)
    listed = ", ".join(f"{kind} {count}" for kind, count in kinds)
    return f"{fault}: {len(results)} sets" + f" ({listed})" * bool(kinds)


if __name__ == "__main__":
    main()
