"""The table of all loss configurations, for the properties in ``test_contract``.

A new loss gets a row with its settings, a builder, and its slow twin in ``tests/reference``; the
suite fails if a member of ``LossConfig``, ``Divergence`` or ``Form`` is in no row. Fields that
restrict a property have a comment with the reason.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mopd_losses import config
from mopd_losses.build import build_loss
from mopd_losses.config import Direction, LossConfig, Merge, TopKDivergenceSettings
from mopd_losses.core.blockwise_head import Head
from mopd_losses.core.loss import Loss, Targets
from mopd_losses.core.span_targets import SpanTargets, span_targets
from mopd_losses.projection.sides import StudentSide
from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from mopd_losses.spans.alm import AlmLoss
from mopd_losses.spans.gold import GoldLoss
from mopd_losses.spans.simct import SimctLoss
from mopd_losses.spans.uld import UldLoss
from mopd_losses.topk.ctkd import CtkdLoss
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss, pooled_targets
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from tests.losses.measures import MEASURES, TRUNCATED, name_of, slow
from tests.losses.prefix_problems import PrefixProblem, prefix_problem
from tests.losses.problems import Floats, Problem, random_problem, scattered, teacher_row, views
from tests.reference import alm, ctkd, gold, sampled, simct, topk_divergence, xtoken
from tests.reference import prefix_kl as slow_prefix_kl
from tests.reference.divergences import by_logits
from tests.reference.dual import Dual, product
from tests.reference.span_view import SpanView

#: Pairs of tokenizations of one text, each class a part of the next one.
TokenizationClass = Literal["one_to_one", "longest_match", "any"]

#: Value by position, and the gradient of their sum by the logits; None where only values exist.
Expected = tuple[Floats, Floats | None]


@dataclass(frozen=True)
class Row:
    """One loss configuration, and the properties it has."""

    name: str
    config: LossConfig
    loss: Callable[[Any], Loss]  # of a problem
    expected: Callable[[Any], Expected]  # of a problem: the slow twin
    problem: Callable[..., Problem] = random_problem  # of a seed and a number of completions
    exact: Callable[[Problem, SpanTargets], Targets] | None = None  # targets in float64
    #: Softmax temperature of the teacher's scores.
    temperature: float = 1.0
    #: Lower bound of the value; None without one.
    least: float | None = 0.0
    #: False where the value is not what the gradient descends.
    conservative: bool = True
    #: False for an infinite value where the student rules out an id that the teacher does not.
    finite: bool = True
    #: False for a corner at equality, where rounding picks the subgradient.
    smooth_at_equality: bool = True
    #: The largest class of tokenizations in which two models equally sure of a text differ by 0.
    equal_belief: TokenizationClass = "any"
    #: False where on-policy descent on a toy moves mass to texts that the teacher rules out.
    keeps_language: bool = True
    #: True for a loss on distributions of one tokenizer.
    one_tokenizer: bool = False

    def targets(self, problem: Problem) -> Targets:
        """Targets in float64, computed from the score's float32."""
        if self.exact is not None:
            return self.exact(problem, exact_spans(problem))
        targets: Any = self.loss(problem).targets(problem.comparisons, problem.offsets)
        columns = {
            f.name: value.double()
            for f in fields(targets)
            if isinstance(value := getattr(targets, f.name), Tensor) and value.is_floating_point()
        }
        return replace(targets, **columns)

    def between(self, student: StudentSide, teacher: StudentSide) -> Loss:
        """Build the loss for two real tokenizers."""
        if self.name.startswith("full_vocabulary"):
            return self.loss(teacher)
        return build_loss(self.config, student, teacher)


def exact_spans(problem: Problem) -> SpanTargets:
    """``span_targets`` in float64."""
    spans = span_targets(problem.comparisons, problem.offsets)
    names = ("token_logprobs", "topk_logprobs", "tail_logprobs")
    return replace(spans, **{name: getattr(spans, name).double() for name in names})


def _by_span(
    of_span: Callable[[Problem, SpanView], Dual | None], *, later: int = 0, temperature: float = 1
) -> Callable[[Problem], Expected]:
    """Apply a slow twin to every span; its value is ``later`` positions behind the span's start."""

    def expected(problem: Problem) -> Expected:
        values = [(at + later, of_span(problem, view)) for at, view in views(problem, temperature)]
        return scattered(problem, [(at, value) for at, value in values if value is not None])

    return expected


def _scattered_rows(
    problem: Problem, values: Iterable[tuple[int, float, Sequence[float]]]
) -> Expected:
    per_token, gradients = np.zeros(len(problem.logits)), np.zeros(problem.logits.shape)
    for position, value, gradient in values:
        per_token[position], gradients[position, : len(gradient)] = value, gradient
    return per_token, gradients


def _spans(problem: Problem) -> Iterable[tuple[int, int, Any, int]]:
    """Yield position and teacher row of the start of every span, the comparison, and the student's
    token."""
    for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True):
        starts = comparison.alignment.student_starts, comparison.alignment.teacher_starts
        for position, row in zip(*(column.tolist() for column in starts), strict=True):
            yield offset + position, row, comparison, int(comparison.student.token_ids[position])


def _topk(
    kind: type[config.CtkdConfig] | type[config.TopKKlConfig],
    settings: TopKDivergenceSettings,
    teacher_temperature: float = 1.0,
) -> Row:
    one_tokenizer = kind is config.TopKKlConfig

    def expected(problem: Problem) -> Expected:
        def values() -> Iterable[tuple[int, float, Sequence[float]]]:
            for position, row, comparison, token in _spans(problem):
                teacher = teacher_row(comparison, row)
                weights, kept, rest = problem.weights.tolist(), teacher.kept, teacher.rest
                if not one_tokenizer:
                    weights, kept, rest = ctkd.on_events(
                        weights,
                        problem.first_tokens.tolist(),
                        token,
                        int(comparison.score.completion.token_ids[row]),
                        kept,
                        rest,
                        teacher.token_probability,
                    )
                yield (
                    position,
                    *topk_divergence.place(
                        problem.logits[position].tolist(),
                        problem.real.tolist(),
                        weights,
                        kept,
                        rest,
                        form=settings.form,
                        divergence=slow(settings),
                        forward=settings.divergence == "forward_kl",
                        floored=settings.unbounded_where_teacher_vanishes,
                        temperature=settings.kd_temperature or teacher_temperature,
                        teacher_temperature=teacher_temperature,
                    ),
                )

        return _scattered_rows(problem, values())

    def built(problem: Problem) -> Loss:
        loss = TopKDivergenceLoss(problem.projection(), settings, teacher_temperature)
        return loss if one_tokenizer else CtkdLoss(loss, problem.events())

    name = f"{'topk_kl' if one_tokenizer else 'ctkd'} {settings.form} {name_of(settings)}"
    return Row(
        name if teacher_temperature == 1 else f"{name} at {teacher_temperature}",
        kind.model_validate(settings.model_dump()),
        built,
        expected,
        problem=_one_vocabulary if one_tokenizer else random_problem,
        temperature=teacher_temperature,
        conservative=settings.divergence != "adaptive_kl",  # the mixture's weight is a constant
        smooth_at_equality=settings.divergence != "tvd",
        equal_belief="any",
        # Only first positions of spans are trained, and mass moves to the untrained others.
        keeps_language=one_tokenizer or settings.form == "renormalised",
        one_tokenizer=one_tokenizer,
    )


def _one_vocabulary(seed: int, completions: int | None = None) -> Problem:
    return random_problem(seed, completions, one_vocabulary=True)


def _full_vocabulary(measure: config.DivergenceSettings, temperature: float) -> Row:
    settings = config.TopKKlConfig.model_validate(
        {**measure.model_dump(), "kd_temperature": temperature}
    )

    def loss(teacher: Problem | StudentSide) -> Loss:
        if isinstance(teacher, Problem):
            real = torch.ones(teacher.teacher_size, dtype=torch.bool)
        else:
            real = torch.tensor(teacher.table.real_ids(teacher.logit_width))
        identity = torch.eye(len(real), dtype=torch.float64)  # the hidden states are the logits
        return FullVocabularyLoss(Head(identity, real), settings)

    def expected(problem: Problem) -> Expected:
        def values() -> Iterable[tuple[int, float, Sequence[float]]]:
            size = problem.teacher_size
            for position, row, comparison, _ in _spans(problem):
                p = (problem.logits[position, :size] / temperature).softmax(0).tolist()
                t = (comparison.score.hidden[row] / temperature).softmax(0).tolist()
                compared = slow(measure)(p, t)
                slopes = [temperature * slope for slope in by_logits(compared.slopes, p)]
                yield position, temperature**2 * compared.value, slopes

        return _scattered_rows(problem, values())

    return Row(
        f"full_vocabulary {name_of(measure)}",
        settings,
        loss,
        expected,
        problem=_one_vocabulary,
        finite=False,  # by definition, as no tail collects the mass
        conservative=measure.divergence != "adaptive_kl",
        smooth_at_equality=measure.divergence != "tvd",
        equal_belief="one_to_one",
        one_tokenizer=True,
    )


def _pooled(divergence: Direction, temperature: float) -> Row:
    forward = divergence == "forward_kl"
    settings = config.CtkdConfig(divergence=divergence, span_rows="pooled")
    return Row(
        f"pooled_ctkd {divergence}",
        settings,
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
        exact=lambda _, spans: pooled_targets(spans),
        temperature=temperature,
        # Rows inside a span condition on pieces that the other side has no boundary for.
        equal_belief="one_to_one",
        keeps_language=not forward,
    )


def _alm(divergence: Literal["kl", "tvd"], tau: float | None) -> Row:
    return Row(
        f"alm {divergence} {tau}",
        config.AlmConfig(divergence=divergence, tau=tau),
        lambda _: AlmLoss(divergence, tau),
        _by_span(lambda _, view: alm.alm(view, divergence, tau)),
        smooth_at_equality=divergence != "tvd",
        keeps_language=divergence == "tvd",  # only likelihoods of the sampled text are compared
    )


def _gold(beta: float, merge: Merge) -> Row:
    weights = (0.7, 0.4)
    return Row(
        f"gold {beta} {merge}",
        config.GoldConfig(
            matched_weight=weights[0], unmatched_weight=weights[1], beta=beta, merge=merge
        ),
        lambda problem: GoldLoss(problem.match(), *weights, beta=beta, merge=merge),
        _by_span(
            lambda problem, view: gold.gold(
                view, problem.real.tolist(), problem.partner, weights, beta, merge
            ),
            later=int(merge == "observed"),
        ),
        least=None,  # the matched part is a divergence of parts that do not sum to one
        smooth_at_equality=False,  # the unmatched part is an L1 distance
        equal_belief="one_to_one",  # merged vectors are over the ids of each side's last token
        keeps_language=beta == 0,
    )


def _uld(merge: Merge) -> Row:
    return Row(
        f"uld {merge}",
        config.UldConfig(merge=merge),
        lambda problem: UldLoss(torch.tensor(problem.real), merge=merge),
        _by_span(
            lambda problem, view: gold.uld(view, problem.real.tolist(), merge),
            later=int(merge == "observed"),
        ),
        smooth_at_equality=False,  # an L1 distance
        # TRL's merge multiplies by probabilities of rows that predict other tokens.
        equal_belief="any" if merge == "bayesian" else "one_to_one",
        keeps_language=merge == "bayesian",
    )


def _simct(divergence: Direction) -> Row:
    forward = divergence == "forward_kl"
    return Row(
        f"simct {divergence}",
        config.SimctConfig(divergence=divergence),
        lambda problem: SimctLoss(problem.match(), divergence),
        _by_span(lambda problem, view: simct.simct(view, problem.partner, forward)),
    )


def _sampled(
    loss_config: LossConfig,
    loss: Loss,
    twin: Callable[..., Dual],
    *,
    has_baseline: bool = False,
    skew: float = 0.0,
) -> Row:
    """``twin`` maps ``p(x)``, ``t(x)`` and ``mu(x)`` of a span's text to the loss.

    Args:
        has_baseline: also give the twin the mean log-ratio, as ``baseline``.
        skew: of the mean log-ratio.
    """
    policy_gradient = isinstance(loss, PolicyGradientLoss)

    def baseline(view: SpanView) -> dict[str, float]:
        if not has_baseline:
            return {}
        kept, student = view.teacher[0].kept, view.student[0]
        own = [student[j].value for j in kept]
        rest = view.teacher[0].rest
        return {"baseline": sampled.mean_log_ratio(own, list(kept.values()), rest, skew)}

    def expected(problem: Problem) -> Expected:
        by_position = {
            offset + at: math.exp(logprob)
            for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True)
            for at, logprob in enumerate(comparison.sampled_logprobs.tolist())
        }
        values = [
            (
                at,
                twin(
                    product([row[x] for row, x in zip(view.student, view.labels, strict=True)]),
                    math.prod(row.token_probability for row in view.teacher),
                    math.prod(by_position[at + token] for token in range(len(view.labels))),
                    **baseline(view),
                ),
            )
            for at, view in views(problem)
        ]
        return scattered(problem, values)

    return Row(
        f"{loss_config.type}{' with a baseline' if has_baseline else ''}"
        f"{' and a proximal teacher' if skew else ''}",
        loss_config,
        lambda _: loss,
        expected,
        problem=_one_vocabulary if has_baseline else random_problem,
        one_tokenizer=has_baseline,
        least=None if policy_gradient else 0.0,  # a single sample's log-ratio has either sign
        conservative=not policy_gradient,
    )


def _prefix_kl(divergence: config.Divergence, floor: float) -> Row:
    def expected(problem: PrefixProblem) -> Expected:
        per_token = np.zeros(len(problem.logits))
        for number, offset in enumerate(problem.offsets):
            student, teacher = problem.sides(number)
            values = slow_prefix_kl.per_token(student, teacher, divergence, floor)
            per_token[offset : offset + len(values)] = values
        return per_token, None

    return Row(
        f"prefix_kl {divergence}",
        config.PrefixKlConfig(divergence=divergence, mass_floor=floor),
        lambda problem: problem.pair.loss(floor, divergence=divergence),
        expected,
        conservative=False,  # ratios of probabilities, and bounds of unknown mass, are constants
        problem=prefix_problem,
        exact=lambda problem, _: problem.targets(divergence, floor),
    )


ROWS: tuple[Row, ...] = (
    *(_topk(config.CtkdConfig, settings) for settings in TRUNCATED),
    _topk(config.CtkdConfig, TRUNCATED[1], 2.0),
    *(
        _topk(config.TopKKlConfig, TopKDivergenceSettings(form=form))
        for form in get_args(config.Form)
    ),
    _full_vocabulary(MEASURES[0], 2.0),
    _full_vocabulary(MEASURES[3], 1.0),
    _full_vocabulary(MEASURES[6], 1.0),
    _full_vocabulary(MEASURES[7], 1.0),
    _pooled("forward_kl", 1.0),
    _pooled("reverse_kl", 2.0),
    _prefix_kl("forward_kl", 0.0),
    _prefix_kl("reverse_kl", 1e-2),
    _prefix_kl("jsd", 0.5),
    _prefix_kl("entropy_aware_kl", 0.5),
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
    _sampled(config.PolicyGradientConfig(), PolicyGradientLoss(), sampled.policy_gradient),
    _sampled(
        config.PolicyGradientConfig(baseline="top_k"),
        PolicyGradientLoss(has_baseline=True),
        sampled.policy_gradient,
        has_baseline=True,
    ),
    *(
        _sampled(
            config.PolicyGradientConfig(baseline=baseline, skew=0.3),
            PolicyGradientLoss(has_baseline=has_baseline, skew=0.3),
            partial(sampled.policy_gradient, skew=0.3),
            has_baseline=has_baseline,
            skew=0.3,
        )
        for baseline, has_baseline in (("none", False), ("top_k", True))
    ),
    _sampled(config.K2Config(), K2Loss(), sampled.k2),
    _sampled(config.K3Config(), K3Loss(), sampled.k3),
)


def missing(
    rows: Sequence[Row], union: object, divergences: Sequence[str], forms: Sequence[str]
) -> set[str]:
    """Return the types, divergences and forms that no row covers.

    Args:
        union: ``LossConfig``.
    """
    (members, *_) = get_args(union)
    types = {member.model_fields["type"].default for member in get_args(members)}
    configs = [row.config for row in rows]
    top_k = [c for c in configs if isinstance(c, config.CtkdConfig)]
    pairs = {(c.form, c.divergence) for c in top_k}
    required = {
        (form, divergence)
        for form in forms
        for divergence in divergences
        if form != "generalised" or divergence in ("forward_kl", "reverse_kl")
    }
    return (types - {c.type for c in configs} - {"auto"}) | {
        f"{form} {divergence}" for form, divergence in required - pairs
    }
