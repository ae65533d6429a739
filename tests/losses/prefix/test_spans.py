"""Prefix KL where roots say less than what was written: spans are compared as wholes."""

import math
from functools import cache
from itertools import count, islice
from typing import Any, cast

import numpy as np
import pytest
import torch

from mopd_losses.prefix.boundaries import places_of
from mopd_losses.prefix.spans import span_masses, spans_of
from mopd_losses.prefix.targets import PrefixTargets
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.prefix.test_exactness import models, scored, sides
from tests.losses.prefix_pairs import (
    END_CHARACTER,
    ExactTopK,
    Pair,
    Problem,
    Tongue,
    compared,
    random_problem,
)
from tests.reference import prefix_kl as slow
from tests.reference.text_model import END

every = pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])

#: No shorter token leads to the long ones, so that all of them have the root ``a``.
PAIRS = {
    "long student": Pair(
        Tongue.of("aba", "abb", "aab", alone=True),
        Tongue.of("ab", "aa", end="<stop>", alone=True),
    ),
    "long teacher": Pair(
        Tongue.of("ab", alone=True), Tongue.of("aba", "abb", end="<stop>", alone=True)
    ),
    "overlapping": Pair(
        Tongue.of("ab", "aba", "abbb", alone=True),
        Tongue.of("abb", "aab", "ba", end="<stop>", alone=True),
    ),
}


def value_and_gradient(
    problem: Problem, targets: PrefixTargets | None = None, **config: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Values by token, and the gradient of their weighted sum by the logits."""
    if targets is None:
        targets = problem.pair.targets([problem.comparison])
    logits = problem.logits.detach().clone().requires_grad_()
    values = problem.pair.value(logits, targets, **config).per_token
    (values * torch.linspace(1, 2, len(values), dtype=torch.float64)).sum().backward()
    assert logits.grad is not None
    return values.detach().numpy(), logits.grad.numpy()


#: A student that wrote ``b`` ``aba`` said in its first row how likely ``baba`` and ``babaa`` were.
EARLIER = Pair(
    Tongue.of("aba", "baba", "babaa", alone=True), Tongue.of("ab", end="<stop>", alone=True)
)


@cache
def problems(number: int, pair: Pair | None = None) -> list[Problem]:
    """Random ones with a span."""
    every_one = (random_problem(seed, pair=pair) for seed in count())
    with_spans = (p for p in every_one if slow.spans(p.student_side(), p.teacher_side))
    return list(islice(with_spans, number))


@every
def test_with_spans_the_loss_equals_the_slow_reference(divergence: str) -> None:
    for problem in [*problems(30), *problems(30, EARLIER)]:
        found, _ = value_and_gradient(problem, divergence=divergence)
        sides = problem.student_side(), problem.teacher_side
        expected = slow.per_token(*sides, divergence, mass_floor=0.0)
        assert found == pytest.approx(expected, abs=1e-10)
        spans = [place.position for place in slow.spans(*sides)]
        targets = problem.pair.targets([problem.comparison])
        assert targets.positions[targets.are_spans].tolist() == spans


def test_a_span_is_a_share_of_all_texts() -> None:
    # From the beginning of the text, where nothing crosses; both sides of each by brute force.
    checked = 0
    for pair in PAIRS.values():
        ours, theirs = models(pair)
        texts = ours.texts
        for text in texts:
            for place in slow.spans(*sides(pair, text, (ours, theirs))):
                (written,) = place.teacher
                if place.at > len(written):
                    continue
                truth = math.fsum(
                    mass
                    for other, mass in texts.items()
                    if other[: place.at] == written
                    and place.at in ours.boundaries(other) | theirs.boundaries(other)
                ) / math.fsum(texts.values())
                for told in (place.student, place.teacher):
                    assert told[written] == pytest.approx(truth, abs=1e-12), text
                checked += 1
    assert checked > 20


STUDENT = Tongue.of("xla", "xmb", alone=True)
TEACHER = Tongue.of("xl", "xm", end="<stop>", alone=True)


def two_words(written: str, shares: tuple[float, float]) -> tuple[Pair, PrefixTargets]:
    """The student wrote one of two words whose root is ``x``; the teacher writes two tokens."""
    pair = Pair(STUDENT, TEACHER)
    read = [*TEACHER.tokenize(written), END]
    rows = torch.full((3, TEACHER.family.logit_width), -torch.inf, dtype=torch.float64)
    rows[0, TEACHER.ids(["xl", "xm"])] = torch.tensor(shares, dtype=torch.float64).log()
    rows[1, TEACHER.ids([read[1]])] = 0.0
    rows[2, TEACHER.ids([END])] = 0.0
    comparison = compared(pair, STUDENT.ids([written, END]), TEACHER.ids(read), rows, k=len(shares))
    return pair, pair.targets([comparison])


def gradient_by(logits: torch.Tensor, pair: Pair, targets: PrefixTargets, divergence: str) -> float:
    """Nats of the loss, after its gradient is in the logits."""
    value = pair.value(logits, targets, divergence=divergence).per_token.sum()
    value.backward()
    return value.item()


@every
@pytest.mark.parametrize("written", ["xla", "xmb"])
def test_of_two_words_with_one_root_the_teachers_is_learnt(divergence: str, written: str) -> None:
    # The teacher says xmb; the student mostly xla, and the root of both is x.
    pair, targets = two_words(written, (0.1, 0.9))
    words = STUDENT.ids(["xla", "xmb"])
    logits = torch.full((2, STUDENT.family.logit_width), -30.0, dtype=torch.float64)
    logits[0, words] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    logits[1, STUDENT.ids([END])] = 0.0
    assert gradient_by(logits.requires_grad_(), pair, targets, divergence) > 0.1
    assert logits.grad is not None
    wrong, right = logits.grad[0, words].tolist()
    assert right < -0.05 < 0.05 < wrong

    exact = torch.full((2, STUDENT.family.logit_width), -60.0, dtype=torch.float64)
    exact[0, words] = torch.tensor([0.1, 0.9], dtype=torch.float64).log()
    exact[1, STUDENT.ids([END])] = 0.0
    assert gradient_by(exact.requires_grad_(), pair, targets, divergence) < 2e-5
    assert exact.grad is not None
    assert exact.grad.abs().max() < 1e-5


def test_a_word_outside_the_top_k_is_known_too() -> None:
    # Of one candidate, xm, the student wrote the other word, and the teacher had to read it.
    pair = Pair(STUDENT, TEACHER)
    rows = torch.full((3, TEACHER.family.logit_width), -torch.inf, dtype=torch.float64)
    rows[0, TEACHER.ids(["xl", "xm"])] = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    rows[1, TEACHER.ids(["a", "b"])] = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    rows[2, TEACHER.ids([END])] = 0.0
    written = STUDENT.ids(["xla", END]), TEACHER.ids(["xl", "a", END])
    targets = pair.targets([compared(pair, *written, rows, k=1)])
    (span,) = torch.nonzero(targets.are_spans).flatten().tolist()
    assert targets.events[span, 0].exp().item() == pytest.approx(0.25 * 0.4)
    assert targets.rests[span].exp().item() == pytest.approx(1 - 0.25 * 0.4)


def test_a_teacher_that_finds_the_way_impossible_tells_no_number_that_is_none() -> None:
    (problem,) = problems(1)
    comparison = problem.comparison
    places = places_of(
        comparison.student, comparison.score.completion, problem.pair.loss().junctions
    )
    spans = spans_of(places, problem.pair.units)
    topk = comparison.score.topk
    impossible = ExactTopK(
        topk.ids,
        np.full_like(topk.logprobs, -np.inf),
        np.full_like(topk.token_logprobs, -np.inf),
        topk.tail_logprobs,
    )
    known = np.full(len(places), -np.inf)
    with np.errstate(invalid="raise"):
        found = span_masses(places, spans, cast(TopKLogprobs, impossible), known)
    assert found.nats.tolist() == found.rests.tolist() == [-math.inf] * len(spans)


def test_there_are_no_spans_where_shorter_tokens_lead_to_every_long_one() -> None:
    pair = Pair(Tongue.of("aa", "aaa", "ab", "aba"), Tongue.of("bb", "aa", "ba", end="<stop>"))
    token_models = models(pair)
    for text in ("aab", "abab", "bbaa", "aaaa"):
        _, comparison = scored(pair, text, token_models)
        assert not pair.targets([comparison]).are_spans.any()


def test_spans_are_no_part_of_what_is_measured() -> None:
    pair, targets = two_words("xla", (0.1, 0.9))
    logits = torch.zeros((2, STUDENT.family.logit_width), dtype=torch.float64)
    measured = pair.value(logits, targets).measured
    assert {len(found) for found in measured.values()} == {int((~targets.are_spans).sum())}


def test_a_span_stays_with_the_positions_that_it_is_read_of() -> None:
    for problem in problems(10):
        targets = problem.pair.targets([problem.comparison])
        positions = len(problem.logits)
        uncuttable = targets.uncuttable(positions).tolist()
        whole, _ = value_and_gradient(problem, targets)
        for cut in range(1, positions):
            if uncuttable[cut]:
                continue
            parts = [targets.between(0, cut), targets.between(cut, positions)]
            rows = [problem.logits[:cut], problem.logits[cut:]]
            found = [
                problem.pair.value(logits, part).per_token
                for logits, part in zip(rows, parts, strict=True)
            ]
            assert torch.cat(found).tolist() == pytest.approx(whole.tolist(), abs=1e-12)


def test_control_tokens_are_no_part_of_a_span() -> None:
    found = [
        text
        for problem in problems(30)
        for place in slow.spans(problem.student_side(), problem.teacher_side)
        for text in place.teacher
    ]
    assert found
    assert not any(END_CHARACTER in text for text in found)
