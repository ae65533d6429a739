"""Every loss on spans, how to make it for a problem, and its slow reference."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mopd_losses.config import Direction, Merge, TopKDivergenceSettings
from mopd_losses.core.loss import Loss, Targets
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.spans.alm import AlmLoss
from mopd_losses.spans.gold import GoldLoss
from mopd_losses.spans.simct import SimctLoss
from mopd_losses.spans.uld import UldLoss
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss, pooled_targets
from mopd_losses.xtoken.hkl import HklLoss
from mopd_losses.xtoken.pkl_parity import PklParityLoss
from mopd_losses.xtoken.support_targets import topk_support
from tests.losses.span_problems import Problem, teacher_row, views
from tests.reference import alm, gold, simct, xtoken
from tests.reference.dual import Dual
from tests.reference.span_view import SpanView, TeacherRow

Expected = list[tuple[int, Dual]]  # (slot, value)


@dataclass(frozen=True)
class Case:
    """A loss with settings."""

    name: str
    make: Callable[[Problem], Loss]
    expected: Callable[[Problem], Expected]
    from_spans: Callable[[Problem, SpanTargets], Targets] | None = None

    @property
    def couples_rows(self) -> bool:
        """Whether unrelated rows change the value, by X-Token's design."""
        return self.name.startswith(("pkl", "hkl"))

    def targets(self, problem: Problem) -> Targets:
        """The loss's own; in float64 where it computes on what a teacher sent in float32."""
        if self.from_spans is None:
            return self.make(problem).targets(problem.comparisons, problem.offsets)
        return self.from_spans(problem, exact_spans(problem))


def exact_spans(problem: Problem) -> SpanTargets:
    """``span_targets`` in float64."""
    spans = span_targets(problem.comparisons, problem.offsets)
    names = ("token_logprobs", "topk_logprobs", "tail_logprobs")
    return replace(spans, **{name: getattr(spans, name).double() for name in names})


def _on_support(problem: Problem, spans: SpanTargets) -> Targets:
    return topk_support(spans, problem.teacher_size)


def _by_span(
    of_span: Callable[[Problem, SpanView], Dual | None], *, later: int = 0, temperature: float = 1
) -> Callable[[Problem], Expected]:
    """A reference of one span, for all; ``later``: how far from the span's start its value is."""

    def expected(problem: Problem) -> Expected:
        found = [(slot, of_span(problem, view)) for slot, view in views(problem, temperature)]
        return [(slot + later, value) for slot, value in found if value is not None]

    return expected


def _alm(divergence: str, tau: float | None) -> Case:
    return Case(
        f"alm {divergence} {tau}",
        lambda _: AlmLoss(divergence, tau),  # type: ignore[arg-type]
        _by_span(lambda _, view: alm.alm(view, divergence, tau)),
    )


def _gold(beta: float, how: Merge) -> Case:
    weights = (0.7, 0.4)
    return Case(
        f"gold {beta} {how}",
        lambda problem: GoldLoss(problem.match(), *weights, beta=beta, merge=how),
        _by_span(
            lambda problem, view: gold.gold(
                view, problem.real.tolist(), problem.partner, weights, beta, how
            ),
            later=int(how == "observed"),
        ),
    )


def _uld(how: Merge) -> Case:
    return Case(
        f"uld {how}",
        lambda problem: UldLoss(torch.tensor(problem.real), merge=how),
        _by_span(
            lambda problem, view: gold.uld(view, problem.real.tolist(), how),
            later=int(how == "observed"),
        ),
    )


def _simct(divergence: Direction) -> Case:
    forward = divergence == "forward_kl"
    return Case(
        f"simct {divergence}",
        lambda problem: SimctLoss(problem.match(), divergence),
        _by_span(lambda problem, view: simct.simct(view, problem.partner, forward)),
    )


def _pooled(divergence: Direction, temperature: float) -> Case:
    forward = divergence == "forward_kl"
    settings = TopKDivergenceSettings(divergence=divergence)
    return Case(
        f"pooled {divergence} {temperature}",
        lambda problem: PooledCtkdLoss(problem.projection(), settings, temperature),
        _by_span(
            lambda problem, view: xtoken.pooled(
                view.student,
                problem.weights.tolist(),
                problem.real.tolist(),
                view.teacher,
                forward,
                temperature,
            ),
            temperature=temperature,
        ),
        lambda _, spans: pooled_targets(spans),
    )


def support_of(problem: Problem) -> list[int]:
    """Every id that any row of the micro-batch sent."""
    rows = [
        teacher_row(comparison, row)
        for comparison in problem.comparisons
        for row in range(len(comparison.score.completion))
    ]
    return sorted({j for row in rows for j in row.kept})


def on_support(problem: Problem, rows: list[TeacherRow]) -> list[list[float]]:
    support = support_of(problem)
    return [xtoken.filled(row, support, problem.teacher_size) for row in rows]


def _pkl(divergence: Direction, temperature: float) -> Case:
    forward = divergence == "forward_kl"
    return Case(
        f"pkl {divergence} {temperature}",
        lambda problem: PklParityLoss(problem.projection(), divergence, temperature),
        _by_span(
            lambda problem, view: xtoken.pkl(
                view.student,
                problem.weights.tolist(),
                on_support(problem, view.teacher),
                support_of(problem),
                forward,
                temperature,
            ),
            temperature=temperature,
        ),
        _on_support,
    )


def _hkl(divergence: Direction, generalised: bool, temperature: float, ranks: int) -> Case:
    forward = divergence == "forward_kl"
    return Case(
        f"hkl {divergence} {generalised} {temperature} {ranks}",
        lambda problem: HklLoss(problem.match(), divergence, generalised, temperature, ranks),
        _by_span(
            lambda problem, view: xtoken.hkl(
                view.student,
                problem.real.tolist(),
                problem.partner,
                on_support(problem, view.teacher),
                support_of(problem),
                forward,
                generalised,
                temperature,
                ranks,
            ),
            temperature=temperature,
        ),
        _on_support,
    )


CASES = [
    _pooled("forward_kl", 1.0),
    _pooled("reverse_kl", 2.0),
    _alm("kl", None),
    _alm("tvd", None),
    _alm("kl", 3.0),
    _alm("tvd", 3.0),
    _gold(0.5, "bayesian"),
    _gold(0.1, "observed"),
    _gold(0.0, "bayesian"),
    _gold(1.0, "bayesian"),
    _uld("bayesian"),
    _uld("observed"),
    _simct("forward_kl"),
    _simct("reverse_kl"),
    _pkl("forward_kl", 1.0),
    _pkl("reverse_kl", 2.0),
    _hkl("forward_kl", False, 2.0, 8192),
    _hkl("reverse_kl", False, 1.0, 2),
    _hkl("forward_kl", True, 1.0, 8192),
    _hkl("reverse_kl", True, 1.0, 8192),
]
