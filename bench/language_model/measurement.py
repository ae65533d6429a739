"""Measure the distance of a student to its teacher on held-out prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.language_model.material import TEXTS
from mopd_protocol import Message
from mopd_trainer import RolloutConfig, Student

_BATCH = 16

#: Resampled sets of texts, for ranges.
_DRAWS = 1_000


@dataclass(frozen=True)
class Completion:
    """A model's completion of a held-out prompt."""

    prompt: str
    text: str  # without control tokens
    token_ids: list[int]
    nats: float  # of its tokens, at the temperature at which they were sampled


def completed(
    model: Student, prompts: Sequence[str], max_new_tokens: int, *, temperature: float = 0.0
) -> list[Completion]:
    """Return a model's completions; greedy ones by default."""
    settings = RolloutConfig(temperature=temperature, max_new_tokens=max_new_tokens)
    completions: list[Completion] = []
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        generations = model.generate([prompt_ids(model, p) for p in batch], settings, seed=0)
        for prompt, generation in zip(batch, generations, strict=True):
            sequence = model.table.sequence(generation.token_ids)
            text = sequence.text.decode("utf-8", "replace")
            nats = -float(sum(generation.logprobs))
            completions.append(Completion(prompt, text, generation.token_ids, nats))
    return completions


def prompt_ids(model: Student, prompt: str) -> list[int]:
    """Return a user's message in the model's chat template."""
    return model.prompt_token_ids([Message(role="user", content=prompt)])


@dataclass(frozen=True)
class Measure:
    """A mean over tokens or bytes, with a 95 % range: bootstrap over the texts."""

    mean: float
    low: float
    high: float
    totals: list[float]  # of each text
    sizes: list[float]

    @classmethod
    def of(cls, totals: Sequence[float], sizes: Sequence[float]) -> "Measure":
        """Build the ratio of the sums of both, one entry a text."""
        mean = sum(totals) / sum(sizes)
        return cls(*_range(mean, _drawn(totals, sizes)), list(totals), list(sizes))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Change:
    """Difference by training, with 95 % ranges over the same drawn texts before and after.

    Ranges of a difference are narrower than those of its two sides: texts that are hard before are
    hard after, too.
    """

    difference: tuple[float, float, float]  # after minus before: mean, low, high
    gap_closed: tuple[float, float, float] | None  # share of the distance to the teacher

    @classmethod
    def of(cls, before: Measure, after: Measure, teacher: Measure) -> "Change":
        """Compare three measures of the same texts."""
        drawn = [_drawn(measure.totals, measure.sizes) for measure in (before, after, teacher)]
        means = [measure.mean for measure in (before, after, teacher)]
        difference = _range(means[1] - means[0], drawn[1] - drawn[0])
        gaps = drawn[2] - drawn[0]
        if means[2] == means[0] or not np.all(gaps * (means[2] - means[0]) > 0):
            return cls(difference, None)  # the teacher is not better on every draw
        closed = _range((means[1] - means[0]) / (means[2] - means[0]), (drawn[1] - drawn[0]) / gaps)
        return cls(difference, closed)

    def __str__(self) -> str:
        mean, low, high = self.difference
        text = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
        if self.gap_closed is None:
            return text
        mean, low, high = (100 * value for value in self.gap_closed)
        return f"{text}, {mean:.0f} % of the gap ({low:.0f} to {high:.0f})"


def _drawn(totals: Sequence[float], sizes: Sequence[float]) -> np.ndarray:
    """Return the means of resampled texts; the same texts for every measure of as many."""
    columns = np.array([totals, sizes])
    drawn = np.random.default_rng(0).integers(len(totals), size=(_DRAWS, len(totals)))
    return np.divide(*columns[:, drawn].sum(axis=2))


def _range(mean: float, drawn: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return mean, float(low), float(high)


@torch.no_grad()
def token_agreement(model: Student, completions: Sequence[Completion]) -> dict[str, Measure]:
    """Return nats per token of a teacher's completions, and how often the most likely token agrees.

    For a model with the teacher's tokenizer.
    """
    nats: list[float] = []
    agreed: list[float] = []
    network = model.full_model().eval()
    for completion in completions:
        prompt, token_ids = prompt_ids(model, completion.prompt), completion.token_ids
        ids = torch.tensor([[*prompt, *token_ids]])
        logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.tensor(token_ids)
        nats.append(float(torch.nn.functional.cross_entropy(logits, expected, reduction="sum")))
        agreed.append(float((logits.argmax(dim=1) == expected).sum()))
    tokens = [float(len(completion.token_ids)) for completion in completions]
    return {
        "nats_per_token": Measure.of(nats, tokens),
        "top1_agreement": Measure.of(agreed, tokens),
    }


def bits_per_byte(model: Student, texts: Sequence[tuple[str, str]]) -> Measure:
    """Return bits per byte of the second text of each pair after a prompt with the first."""
    bits = [
        -float(model.logprobs(prompt_ids(model, prompt), model.identity.encoder.encode(text)).sum())
        / math.log(2)
        for prompt, text in texts
    ]
    return Measure.of(bits, [float(len(text.encode())) for _, text in texts])


@dataclass(frozen=True)
class Reference:
    """Completions of the held-out prompts by a teacher."""

    greedy: list[Completion]
    samples: list[Completion]  # at temperature 1

    @classmethod
    def of(cls, teacher: Student, prompts: Sequence[str], max_new_tokens: int) -> "Reference":
        """Generate both."""
        return cls(
            completed(teacher, prompts, max_new_tokens),
            completed(teacher, prompts, max_new_tokens, temperature=1.0),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(len(each.token_ids) for each in [*self.greedy, *self.samples])


def measure(model: Student, reference: Reference, *, same_tokenizer: bool) -> dict[str, Measure]:
    """Return all measures of a student against its teacher.

    A student without the variety of its teacher has more bits per byte of the teacher's samples,
    and its samples a smaller entropy (in bits per byte).
    """
    own = [
        each
        for each in completed(
            model, [each.prompt for each in reference.samples], reference.longest, temperature=1.0
        )
        if each.text
    ]
    return {
        **(token_agreement(model, reference.greedy) if same_tokenizer else {}),
        "completions_bits_per_byte": bits_per_byte(model, _texts(reference.greedy)),
        "samples_bits_per_byte": bits_per_byte(model, _texts(reference.samples)),
        "entropy_bits_per_byte": Measure.of(
            [each.nats / math.log(2) for each in own],
            [float(len(each.text.encode())) for each in own],
        ),
        "texts_bits_per_byte": bits_per_byte(
            model, [(f"Continue: {beginning}", rest) for beginning, rest in TEXTS]
        ),
    }


def _texts(completions: Sequence[Completion]) -> list[tuple[str, str]]:
    return [(each.prompt, each.text) for each in completions if each.text]
