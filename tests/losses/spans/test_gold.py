"""GOLD and ULD: merging by the chain rule, whole and truncated teachers, matched and unmatched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from mopd_losses.config import Merge
from mopd_losses.core.span_targets import SpanTargets
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.vocabulary_match import VocabularyMatch
from mopd_losses.spans.gold import GoldLoss, adaptive_weights
from mopd_losses.spans.merged_spans import mergeable_targets, merged_spans
from mopd_losses.spans.uld import UldLoss
from tests.losses.problems import (
    Problem,
    random_problem,
    scattered,
    value_and_gradient,
    views,
    with_full_rows,
)
from tests.reference import gold as reference
from tests.reference.dual import Dual
from tests.reference.span_view import SpanView, TeacherRow

seeds = st.integers(0, 2**32)
merges: list[Merge] = ["bayesian", "observed"]
both_merges = pytest.mark.parametrize("merge", merges)
A, B, C = 0, 1, 2
#: A bigram model: the row of each token is the distribution of the next token; the joint of "a, b"
#: is 0.6 * 0.7.
START, AFTER = [0.6, 0.3, 0.1], {A: [0.1, 0.7, 0.2], B: [0.3, 0.1, 0.6]}


def all_rows(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def span_pairs(student: list[tuple[int, int]], teacher: list[tuple[int, int]]) -> SpanTargets:
    """Spans of given positions and rows; every token is id 0 and nothing was sent."""
    positions, rows = student[-1][1], teacher[-1][1]
    return SpanTargets(
        *(
            torch.tensor(column)
            for side in (student, teacher)
            for column in zip(*side, strict=True)
        ),
        span_bytes=torch.ones(len(student), dtype=torch.int64),
        labels=torch.zeros(positions, dtype=torch.int64),
        sampled_logprobs=torch.zeros(positions),
        teacher_ids=torch.zeros(rows, dtype=torch.int64),
        token_logprobs=torch.zeros(rows),
        topk_ids=torch.zeros(rows, 0, dtype=torch.int64),
        topk_logprobs=torch.zeros(rows, 0),
        tail_logprobs=torch.zeros(rows),
    )


def whole(problem: Problem, merge: Merge) -> tuple[SpanTargets, Tensor]:
    """The problem's spans with a whole teacher in place of what was sent; and its logits."""
    targets = mergeable_targets(problem.comparisons, problem.offsets, merge)
    draw = np.random.default_rng(len(targets.teacher_ids))
    logits = torch.tensor(draw.normal(size=(len(targets.teacher_ids), problem.teacher_size)))
    return with_full_rows(targets, logits), logits


def whole_views(problem: Problem, logits: Tensor) -> list[tuple[int, SpanView]]:
    """Spans as the reference sees them, with the whole teacher."""
    rows = logits.softmax(dim=1).tolist()
    positioned_views: list[tuple[int, SpanView]] = []
    spans = iter(views(problem))
    row = 0
    for comparison in problem.comparisons:
        tokens = comparison.score.completion.token_ids.tolist()
        full = [
            TeacherRow(dict(enumerate(p)), 0.0, y, p[y])
            for p, y in zip(rows[row : row + len(tokens)], tokens, strict=True)
        ]
        row += len(tokens)
        alignment = comparison.alignment
        for c, d in zip(alignment.teacher_starts, alignment.teacher_ends, strict=True):
            position, view = next(spans)
            following = full[d] if d < len(full) else None
            positioned_views.append(
                (position, replace(view, teacher=full[c:d], next_teacher=following))
            )
    return positioned_views


@both_merges
def test_merging_a_bigram_models_two_tokens(merge: Merge) -> None:
    rows = torch.tensor([START, AFTER[A], AFTER[B]], dtype=torch.float64).log()
    student = DenseRows(rows, all_rows(3))
    targets = span_pairs([(0, 2)], [(0, 1)])
    if merge == "observed":  # moved one later, with the labels of the tokens before
        targets = replace(
            span_pairs([(1, 3)], [(0, 1)]), labels=torch.tensor([C, A, B], dtype=torch.int64)
        )
    else:
        targets = replace(targets, labels=torch.tensor([A, B]))
    merged = merged_spans(student, targets, merge)
    vector = student.logprobs(merged.positions.repeat(3), torch.arange(3)) + merged.log_factors
    expected = [0.06, 0.42, 0.12] if merge == "bayesian" else [0.010, 0.070, 0.020]
    assert vector.exp().tolist() == pytest.approx(expected)
    view = SpanView(
        student=[[Dual(p) for p in START], [Dual(p) for p in AFTER[A]]],
        labels=[A, B],
        teacher=[reference.teacher_row({0: 1.0})],
        next_student=[Dual(p) for p in AFTER[B]],
        next_teacher=reference.teacher_row({0: 1.0}),
    )
    slow = reference.merge(view, merge)
    assert slow is not None
    assert [p.value for p in slow[0]] == pytest.approx(expected)


@given(seed=seeds)
@settings(deadline=None, max_examples=15)
def test_a_merged_vector_weighs_what_was_already_written_weighs(seed: int) -> None:
    problem = random_problem(seed)
    targets, _ = whole(problem, "bayesian")
    merged = merged_spans(problem.rows(), targets, "bayesian")
    log_p = problem.logits.masked_fill(~torch.tensor(problem.real), -torch.inf).log_softmax(dim=1)
    for at, (a, b) in enumerate(
        zip(targets.student_starts.tolist(), targets.student_ends.tolist(), strict=True)
    ):
        factor = sum(log_p[position, targets.labels[position]] for position in range(a, b - 1))
        assert merged.log_factors[at].item() == pytest.approx(float(factor), abs=1e-12)
        assert merged.positions[at].item() == b - 1


@both_merges
@given(seed=seeds, beta=st.sampled_from([0.0, 0.3, 1.0]))
@settings(deadline=None, max_examples=15)
def test_from_whole_distributions_gold_equals_the_slow_reference(
    merge: Merge, seed: int, beta: float
) -> None:
    problem = random_problem(seed)
    problem.logits.requires_grad_()
    targets, logits = whole(problem, merge)
    loss = GoldLoss(problem.match(), 0.3, 0.8, beta=beta, merge=merge)
    output = loss(problem.rows(), targets)
    value, gradient = value_and_gradient(problem, output)
    real = problem.real.tolist()
    expected = [
        (position + (merge == "observed"), compared)
        for position, view in whole_views(problem, logits)
        if (compared := reference.gold(view, real, problem.partner, (0.3, 0.8), beta, merge))
        is not None
    ]
    expected_value, expected_gradient = scattered(problem, expected)
    np.testing.assert_allclose(value, expected_value, atol=1e-10)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-8)


def test_observed_skips_a_completions_last_span_and_never_reads_past_it() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        bayesian = mergeable_targets(problem.comparisons, problem.offsets, "bayesian")
        observed = mergeable_targets(problem.comparisons, problem.offsets, "observed")
        ends = [
            offset + len(comparison.student)
            for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True)
        ]
        last = [end for end in bayesian.student_ends.tolist() if end in ends]
        assert observed.spans <= bayesian.spans - len(last)
        for end in observed.student_ends.tolist():
            assert any(
                offset < end <= offset + len(comparison.student)
                for comparison, offset in zip(problem.comparisons, problem.offsets, strict=True)
            )


def one_vocabulary(seed: int, size: int = 5) -> tuple[Tensor, SpanTargets, VocabularyMatch]:
    """Student and teacher are one model; some ids are in common, each with itself."""
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(5, size)), requires_grad=True)
    spans = [(0, 1), (1, 3), (3, 5)]
    labels = torch.tensor(draw.integers(0, size, 5))
    targets = replace(span_pairs(spans, spans), labels=labels, teacher_ids=labels)
    common = torch.tensor(draw.random(size) < 0.6)
    match = VocabularyMatch(torch.where(common, torch.arange(size), -1), ~common)
    return logits, with_full_rows(targets, logits.detach()), match


def cut_to(targets: SpanTargets, k: int) -> SpanTargets:
    """The top-k of whole rows."""
    return replace(
        targets,
        topk_ids=targets.topk_ids[:, :k],
        topk_logprobs=targets.topk_logprobs[:, :k],
        tail_logprobs=targets.topk_logprobs[:, k:].logsumexp(dim=1),
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("k", [0, 2, 4, 5])
@given(seed=seeds)
@settings(deadline=None, max_examples=4)
def test_one_model_on_both_sides_costs_nothing_also_cut_to_its_top_k(
    k: int, beta: float, seed: int
) -> None:
    logits, targets, match = one_vocabulary(seed)
    targets = cut_to(targets, k) if k < 5 else targets
    student = DenseRows(logits, all_rows(5))
    output = GoldLoss(match, 1.0, 1.0, beta)(student, targets)
    assert output.per_token.abs().max() < 1e-12
    assert UldLoss(all_rows(5))(student, targets).per_token.abs().max() < 1e-12


def test_the_matched_part_is_stationary_where_both_agree_but_not_as_a_plain_kl() -> None:
    logits, targets, match = one_vocabulary(0)
    match = VocabularyMatch(torch.tensor([0, 1, 2, -1, -1]), torch.tensor([0, 0, 0, 1, 1]).bool())

    def slope(beta: float) -> Tensor:
        student = DenseRows(logits, all_rows(5))
        output = GoldLoss(match, 1.0, 0.0, beta)(student, targets)
        (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
        return gradient

    assert slope(0.5).abs().max() < 1e-12
    # KL of parts takes mass from every id that is not in common, of the rows that are kept.
    assert (slope(0.0)[[0, 2, 4]][:, 3:] > 1e-3).all()


@given(seed=seeds, size=st.integers(1, 8), teacher_size=st.integers(1, 8))
@settings(deadline=None, max_examples=25)
def test_uld_is_the_cheapest_assignment_of_one_set_of_masses_to_the_other(
    seed: int, size: int, teacher_size: int
) -> None:
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(1, size)) * 2)
    teacher = torch.tensor(draw.normal(size=(1, teacher_size)) * 2)
    targets = with_full_rows(span_pairs([(0, 1)], [(0, 1)]), teacher)
    value = UldLoss(all_rows(size))(DenseRows(logits, all_rows(size)), targets).per_token.item()
    width = max(size, teacher_size)
    p = np.pad(logits.softmax(dim=1)[0].numpy(), (0, width - size))
    t = np.pad(teacher.softmax(dim=1)[0].numpy(), (0, width - teacher_size))
    costs = np.abs(p[:, None] - t[None, :])
    assert value == pytest.approx(costs[linear_sum_assignment(costs)].sum(), abs=1e-12)


@given(seed=seeds, k=st.integers(0, 9))
@settings(deadline=None, max_examples=25)
def test_uld_from_a_top_k_is_too_small_by_at_most_both_rests(seed: int, k: int) -> None:
    draw = np.random.default_rng(seed)
    logits, teacher = (torch.tensor(draw.normal(size=(1, 10)) * 2) for _ in range(2))
    targets = with_full_rows(span_pairs([(0, 1)], [(0, 1)]), teacher)
    student = DenseRows(logits, all_rows(10))
    exact = UldLoss(all_rows(10))(student, targets).per_token.item()
    value = UldLoss(all_rows(10))(student, cut_to(targets, k)).per_token.item()
    p = logits.softmax(dim=1)[0].sort(descending=True).values
    rests = p[k:].sum().item() + cut_to(targets, k).tail_logprobs.exp().item()
    assert exact - rests - 1e-12 <= value <= exact + 1e-12


def test_an_id_in_common_that_the_student_rules_out_is_as_if_it_had_not_been_sent() -> None:
    logits = torch.tensor([[0.3, -torch.inf, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    student = DenseRows(logits, all_rows(4))
    teacher = torch.tensor([[0.2, 0.4, 0.3, 0.1]]).double().log()
    targets = with_full_rows(span_pairs([(0, 1)], [(0, 1)]), teacher)
    unsent = targets.topk_ids == 1
    without = replace(
        targets,
        topk_ids=targets.topk_ids.masked_fill(unsent, -1),
        topk_logprobs=targets.topk_logprobs.masked_fill(unsent, -torch.inf),
        tail_logprobs=torch.tensor([0.4]).double().log(),
    )
    match = VocabularyMatch(torch.tensor([0, 1, -1, -1]), torch.tensor([0, 0, 1, 1]).bool())
    values, expected = (
        GoldLoss(match, 1.0, 1.0)(student, spans).per_token for spans in (targets, without)
    )
    torch.testing.assert_close(values, expected)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    assert gradient.isfinite().all()


def test_weights_by_default_are_the_share_in_common_and_the_rest() -> None:
    match = VocabularyMatch(torch.tensor([4, -1, 2, 0, -1]), all_rows(6))
    assert adaptive_weights(match) == pytest.approx((0.6, 0.4))
    assert adaptive_weights(match, teacher_width=12) == pytest.approx((0.25, 0.75))


def test_factors_are_clamped_above_one_in_a_hundred_million() -> None:
    logits = torch.tensor([[-100.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    targets = span_pairs([(0, 2)], [(0, 2)])
    targets = replace(targets, token_logprobs=torch.tensor([-torch.inf, 0.0]))
    merged = merged_spans(DenseRows(logits, all_rows(2)), targets, "bayesian")
    assert merged.log_factors.item() == pytest.approx(np.log(1e-8))
    assert merged.teacher_log_factors.item() == pytest.approx(np.log(1e-8))
