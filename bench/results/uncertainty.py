"""E7: divergences of a student with little capacity, and the variance of the policy gradient.

The student is a table of logits of low rank: it cannot match every context. It begins near the
teacher (forward KL), or with random logits.
"""

import time
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from bench.results.claim import Claim, Curves
from mopd_losses.config import Divergence, TopKDivergenceSettings
from mopd_losses.divergences.divergences import divergence_of
from mopd_losses.divergences.truncation import floored_tail, tail_reverse_kl, with_tail_bucket
from mopd_losses.sampled.policy_gradient import mean_log_ratios

_CONTEXTS, _VOCABULARY, _TOP_K = 192, 1_000, 64
_STEPS, _WARM_STEPS, _RATE, _WARM_RATE = 400, 60, 0.01, 0.03
#: Of the logits; tables are of the first.
_RANKS = (8, 16, 32)
#: Probabilities of the teacher fall as rank to minus this, in the first and second half.
_CERTAIN, _UNCERTAIN = 4.5, 1.4
ARMS: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "entropy_aware_kl", "jsd")
BASELINES = ("reverse KL", "least variance")
_SIZES = (8, _TOP_K, _VOCABULARY)


def measure(seeds: int) -> list[Claim]:
    """Fit every divergence from either start, and compute variances along one of the fits."""
    return [_divergences(seeds), _baselines(seeds)]


def _divergences(seeds: int) -> Claim:
    started = time.process_time()
    rows: dict[str, list[list[float]]] = {}
    curves: Curves = {arm: [] for arm in ARMS}
    for arm in ARMS:
        figures = [
            [_figures(_fit(arm, _WARM_STEPS, rank, seed)[-1], _teacher(seed)) for rank in _RANKS]
            for seed in range(seeds)
        ]
        rows[arm] = [list(column) for column in zip(*(each[0] for each in figures), strict=True)]
        for each in figures:
            overlaps = [overlap for _, overlap, _ in each]
            curves[arm].append(list(zip(map(float, _RANKS), overlaps, strict=True)))
    for arm in ARMS:
        cold = [
            _figures(_fit(arm, 0, _RANKS[0], seed)[-1], _teacher(seed)) for seed in range(seeds)
        ]
        rows[f"{arm}, from random logits"] = [list(c) for c in zip(*cold, strict=True)]
    mixed, forward, reverse = (
        [fmean(column) for column in rows[name]]
        for name in ("entropy_aware_kl", "forward_kl", "reverse_kl")
    )
    return Claim(
        name="E7",
        claim="entropy-aware KL keeps certainty and uncertainty of the teacher",
        falsified_if="from a warm student, its mass of the right id is not above that of forward "
        "KL, or its overlap with an uncertain teacher not above those of forward and reverse KL",
        reproduced=mixed[0] > forward[0] and mixed[1] > max(forward[1], reverse[1]),
        columns=("mass of the right id", "overlap if uncertain", "entropy if uncertain"),
        rows=rows,
        curves=curves,
        axes=("rank of the logits", "overlap if the teacher is uncertain"),
        note=f"{_CONTEXTS} contexts, {_VOCABULARY:,} ids, logits of rank {_RANKS[0]}, the "
        f"teacher's top {_TOP_K} with a tail bucket; {_WARM_STEPS} steps of forward KL, then "
        f"{_STEPS} of each divergence. In half of the contexts the teacher is certain (0.25 nats; "
        "its likeliest id, the right one, has 94 %), in the others it has 3.3 nats, of which the "
        "last column is the student's share. From random logits, students with reverse KL remain "
        "certain of other ids.",
        seconds=time.process_time() - started,
    )


def _baselines(seeds: int) -> Claim:
    started = time.process_time()
    rows: dict[str, list[list[float]]] = {
        f"{baseline}, K = {size}": [[], [], []] for baseline, size in product(BASELINES, _SIZES)
    }
    for seed in range(seeds):
        teacher = _teacher(seed)
        for column, student in enumerate(_fit("reverse_kl", _WARM_STEPS, _RANKS[0], seed)):
            without = _variance(student, teacher, "none", _TOP_K)
            for baseline, size in product(BASELINES, _SIZES):
                share = _variance(student, teacher, baseline, size) / without
                rows[f"{baseline}, K = {size}"][column].append(share)
    least = [fmean(column) for column in rows[f"least variance, K = {_TOP_K}"]]
    return Claim(
        name="E7b",
        claim="a baseline from the top-k lowers the variance of the policy gradient",
        falsified_if=f"with K = {_TOP_K} it is above 90 % at any of the three students",
        reproduced=max(least) < 0.9,
        columns=("random logits", f"after {_WARM_STEPS} steps", "at the end"),
        rows=rows,
        curves={},
        axes=("", ""),
        note="Variance of the gradient by the logits, exactly, over that without a baseline; "
        "contexts and fits as in E7, with "
        "reverse KL. The expectation is the same.",
        seconds=time.process_time() - started,
    )


def _teacher(seed: int) -> Tensor:
    """Return log-probabilities [contexts, ids]."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack(
        [torch.randperm(_VOCABULARY, generator=generator) for _ in range(_CONTEXTS)]
    )
    exponents = torch.full((_CONTEXTS, 1), _UNCERTAIN)
    exponents[: _CONTEXTS // 2] = _CERTAIN
    noise = torch.randn(ranks.shape, generator=generator) * 0.3
    return (noise - exponents * (ranks + 1.0).log()).log_softmax(dim=1)


def _fit(arm: Divergence, warm_steps: int, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the student's log-probabilities at first, after the warm start, and at the end."""
    teacher, generator = _teacher(seed), torch.Generator().manual_seed(seed + 1)
    shapes = (_CONTEXTS, rank), (rank, _VOCABULARY)
    factors = [(torch.randn(s, generator=generator) * 0.5).requires_grad_() for s in shapes]
    settings = TopKDivergenceSettings(divergence=arm)
    stages = [_student(factors)]
    for divergence, steps, rate in (
        (TopKDivergenceSettings(), warm_steps, _WARM_RATE),
        (settings, _STEPS, _RATE if warm_steps else _WARM_RATE),
    ):
        optimizer = torch.optim.Adam(factors, lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            _divergence(divergence, factors[0] @ factors[1], teacher).backward()
            optimizer.step()
        stages.append(_student(factors))
    return stages[0], stages[1], stages[2]


def _student(factors: list[Tensor]) -> Tensor:
    return (factors[0] @ factors[1]).detach().log_softmax(dim=1)


def _divergence(settings: TopKDivergenceSettings, logits: Tensor, teacher: Tensor) -> Tensor:
    own, entries, tail = _on_top_k(logits.log_softmax(dim=1), teacher, _TOP_K)
    retained = torch.ones_like(entries, dtype=torch.bool)
    student, teacher = with_tail_bucket(own, entries, tail, retained)
    if settings.unbounded_where_teacher_vanishes:
        teacher = floored_tail(student, teacher)
    return divergence_of(settings)(student, teacher).mean()


def _on_top_k(student: Tensor, teacher: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    entries, ids = teacher.topk(size, dim=1)
    tail = (1 - entries.exp().sum(dim=1)).clamp_min(1e-9).log()
    return student.gather(1, ids), entries, tail


def _figures(student: Tensor, teacher: Tensor) -> tuple[float, float, float]:
    """Return the mass of the right ids, the overlap, and the share of the entropy."""
    half, p, t = _CONTEXTS // 2, student.exp(), teacher.exp()
    right = p.gather(1, teacher.argmax(dim=1, keepdim=True))[:half].mean()
    overlap = torch.minimum(p, t)[half:].sum(dim=1).mean()
    entropies = [-(q * q.log()).sum(dim=1)[half:].mean() for q in (p, t)]
    return float(right), float(overlap), float(entropies[0] / entropies[1])


def _variance(student: Tensor, teacher: Tensor, baseline: str, size: int) -> float:
    """Return the trace of the covariance of the gradient by the logits, the mean of contexts."""
    own, entries, tail = _on_top_k(student, teacher, size)
    means = torch.zeros(len(student))
    if baseline == "least variance":
        means = mean_log_ratios(own, entries, tail)
    elif baseline == "reverse KL":
        retained = torch.ones_like(entries, dtype=torch.bool)
        means = tail_reverse_kl(own, entries, tail, retained)
    p, log_ratios = student.exp(), student - teacher
    squared_norms = 1 - 2 * p + p.square().sum(dim=1, keepdim=True)
    second = (p * squared_norms * (log_ratios - means[:, None]).square()).sum(dim=1)
    kl = (p * log_ratios).sum(dim=1, keepdim=True)
    mean = p * (log_ratios - kl)
    return float((second - mean.square().sum(dim=1)).mean())
