"""E3: the size of the top-k, and the treatment of the rest, for forward and reverse KL.

The student is a free row of logits per context, so that only the objective limits the result.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from bench.results.claim import Claim, Curves
from mopd_losses.divergences.divergences import forward_kl, reverse_kl
from mopd_losses.divergences.truncation import (
    generalised_forward_kl,
    generalised_reverse_kl,
    renormalised,
    tail_forward_kl,
    tail_reverse_kl,
)

_CONTEXTS, _VOCABULARY, _STEPS, _RATE = 48, 1_000, 300, 0.1
SIZES = (2, 8, 20, 64, _VOCABULARY)
FORMS = ("tail_bucket", "generalised", "renormalised", "plain")
SAMPLED = "reverse_kl, one sampled token"
#: Probabilities of the teacher fall as rank to minus this.
EXPONENTS = (2.0, 1.4)
DIRECTIONS = ("forward_kl", "reverse_kl")
#: Teacher's ids whose mass is compared at the end.
_HEAD = 20


def measure(seeds: int) -> list[Claim]:
    """Fit every form, direction and size, and compare with all ids."""
    started = time.process_time()
    curves: Curves = {}
    rows: dict[str, list[list[float]]] = {}
    losses: list[float] = []  # of plain reverse KL, at the end
    for exponent in EXPONENTS:
        for direction, form in product(DIRECTIONS, FORMS):
            name = _name(exponent, direction, form)
            columns: list[list[float]] = [[] for _ in range(len(SIZES) + 1)]
            for seed in range(seeds):
                fits = [_fit(exponent, direction, form, size, seed) for size in SIZES]
                for column, (overlap, _, _) in zip(columns, fits, strict=False):
                    column.append(overlap)
                _, kept, loss = fits[SIZES.index(_HEAD)]
                columns[-1].append(kept)
                if (direction, form) == ("reverse_kl", "plain"):
                    losses.append(loss)
                if form in ("tail_bucket", "plain"):
                    points = [(float(s), each[0]) for s, each in zip(SIZES, fits, strict=True)]
                    curves.setdefault(name, []).append(points)
            rows[name] = columns
        name = f"{SAMPLED}, rank^-{exponent:g}"
        fits = [_fit_sampled(exponent, seed) for seed in range(seeds)]
        curves[name] = [[(float(size), overlap) for size in SIZES] for overlap, _, _ in fits]
        rows[name] = [*[[each[0] for each in fits] for _ in SIZES], [each[1] for each in fits]]
    everything, twenty = len(SIZES) - 1, SIZES.index(_HEAD)
    with_tail = [rows[_name(e, d, "tail_bucket")] for e in EXPONENTS for d in DIRECTIONS]
    kept = [fmean(rows[_name(e, "reverse_kl", "plain")][-1]) for e in EXPONENTS]
    size = Claim(
        name="E3",
        claim="about 20 entries and a tail teach as much as all ids",
        falsified_if="the overlap at 20 entries is below 90 % of that of all ids, for a teacher of "
        "either kind",
        reproduced=all(fmean(r[twenty]) > 0.9 * fmean(r[everything]) for r in with_tail),
        columns=(*(f"overlap, K = {size}" for size in SIZES), f"kept mass of first {_HEAD}"),
        rows=rows,
        curves=curves,
        axes=("K", "overlap with the teacher"),
        note=f"{_CONTEXTS} contexts, {_VOCABULARY:,} ids, probabilities that fall as rank^-2 (the "
        "first 20 ids have 97 % of the mass) or as rank^-1.4 (80 %); 300 steps of Adam on free "
        "logits. Overlap is the sum of the smaller probabilities; kept mass is the student's mass "
        "of the teacher's first 20 ids over the teacher's, at K = 20. `plain` is the sum over the "
        "top-k of the divergence's terms, without a tail or a correction; no loss of mopd has it. "
        "The policy gradient of one sampled token has no K: its row repeats one number.",
        seconds=time.process_time() - started,
    )
    plain = replace(
        size,
        name="E3b",
        claim="plain top-k reverse KL loses the teacher's mass while its loss falls",
        falsified_if="it keeps 60 % of the mass of the teacher's first 20 ids, or its loss does "
        "not fall below that of the teacher itself (0)",
        reproduced=max(kept) < 0.6 and max(losses) < 0,
        columns=(f"kept mass of first {_HEAD}", "overlap"),
        rows={name: [row[-1], row[twenty]] for name, row in rows.items() if "reverse_kl" in name},
        curves={},
        note="The last column of E3, with the overlap at K = 20.",
    )
    return [size, plain]


def _name(exponent: float, direction: str, form: str) -> str:
    return f"{direction}, {form}, rank^-{exponent:g}"


def _teacher(exponent: float, seed: int) -> Tensor:
    """Return log-probabilities [contexts, ids]."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack(
        [torch.randperm(_VOCABULARY, generator=generator) for _ in range(_CONTEXTS)]
    )
    noise = torch.randn(ranks.shape, generator=generator) * 0.3
    return (-exponent * (ranks + 1.0).log() + noise).log_softmax(dim=1)


def _fit(
    exponent: float, direction: str, form: str, size: int, seed: int
) -> tuple[float, float, float]:
    """Return overlap, kept mass and last loss."""
    teacher = _teacher(exponent, seed)
    values, ids = teacher.topk(size, dim=1)
    retained = torch.ones_like(ids, dtype=torch.bool)
    mass = values.exp().sum(dim=1)
    tail = torch.log((1 - mass).clamp_min(1e-9))

    def loss(logprobs: Tensor) -> Tensor:
        return _FORMS[direction, form](logprobs.gather(1, ids), values, tail, retained).mean()

    return _minimise(teacher, loss, seed)


def _fit_sampled(exponent: float, seed: int) -> tuple[float, float, float]:
    """Fit with the policy gradient of one sampled token per context (``policy_gradient``)."""
    teacher, generator = _teacher(exponent, seed), torch.Generator().manual_seed(seed + 2)

    def loss(logprobs: Tensor) -> Tensor:
        token = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
        own = logprobs.gather(1, token)
        return ((own - teacher.gather(1, token)).detach() * own).mean()

    return _minimise(teacher, loss, seed)


def _minimise(
    teacher: Tensor, loss: Callable[[Tensor], Tensor], seed: int
) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(seed + 1)
    logits = torch.randn(teacher.shape, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=_RATE)
    value = torch.zeros(())
    for _ in range(_STEPS):
        optimizer.zero_grad()
        value = loss(logits.log_softmax(dim=1))
        value.backward()
        optimizer.step()
    student = logits.detach().softmax(dim=1)
    overlap = torch.minimum(student, teacher.exp()).sum(dim=1).mean()
    head = teacher.topk(_HEAD, dim=1).indices
    kept = student.gather(1, head).sum() / teacher.exp().gather(1, head).sum()
    return float(overlap), float(kept), float(value.detach())


def _plain(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(dim=1)


_Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_FORMS: dict[tuple[str, str], _Form] = {
    ("forward_kl", "tail_bucket"): tail_forward_kl,
    ("reverse_kl", "tail_bucket"): tail_reverse_kl,
    ("forward_kl", "generalised"): lambda p, t, tail, kept: generalised_forward_kl(p, t, kept),
    ("reverse_kl", "generalised"): lambda p, t, tail, kept: generalised_reverse_kl(p, t, kept),
    ("forward_kl", "renormalised"): lambda p, t, tail, kept: forward_kl(
        renormalised(p, kept), renormalised(t, kept)
    ),
    ("reverse_kl", "renormalised"): lambda p, t, tail, kept: reverse_kl(
        renormalised(p, kept), renormalised(t, kept)
    ),
    ("forward_kl", "plain"): lambda p, t, tail, kept: _plain(t, p),
    ("reverse_kl", "plain"): lambda p, t, tail, kept: _plain(p, t),
}
