"""A divergence of named ids and one rest, compared with a formula in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd.integrations.tail_loss import tail_divergence

WIDTH = 12


def by_formula(logits: torch.Tensor, ids: list[int], teacher: list[float], beta: float) -> float:
    """Return the divergence of one row, by probabilities of the named ids and the rest."""
    probabilities = logits.double().softmax(0)
    student = [probabilities[token].item() for token in ids]
    pairs = list(zip([*student, 1 - sum(student)], [*teacher, 1 - sum(teacher)], strict=True))

    def kl(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)

    p, t = [p for p, _ in pairs], [t for _, t in pairs]
    if beta in (0, 1):
        return kl(p, t) if beta else kl(t, p)
    mixture = [beta * b + (1 - beta) * a for a, b in pairs]
    return beta * kl(t, mixture) + (1 - beta) * kl(p, mixture)


@given(
    seed=st.integers(0, 2**16),
    named=st.integers(1, 5),
    mass=st.floats(0.05, 0.95),
    beta=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_values_are_those_of_the_formula(
    seed: int, named: int, mass: float, beta: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(WIDTH, generator=generator) * 3
    ids = torch.randperm(WIDTH, generator=generator)[:named]
    teacher = torch.rand(named, generator=generator, dtype=torch.float64).softmax(0) * mass
    # One missing entry, and one of an id that the student does not have.
    row_ids = torch.cat([ids, torch.tensor([-1, WIDTH])])[None]
    logprobs = torch.cat([teacher.log(), torch.tensor([-math.inf, math.log(0.01)])])[None]
    values, student_mass, teacher_mass = tail_divergence(
        logits[None], row_ids, logprobs, beta=beta, temperature=temperature
    )
    expected = by_formula(logits / temperature, ids.tolist(), teacher.tolist(), beta)
    assert values.item() == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert teacher_mass.item() == pytest.approx(mass, abs=1e-6)
    own = (logits / temperature).softmax(0)[ids].sum().item()
    assert student_mass.item() == pytest.approx(own, abs=1e-6)


def test_equal_sides_and_empty_rows_have_neither_value_nor_gradient() -> None:
    logits = torch.randn(2, WIDTH, requires_grad=True)
    logprobs, ids = logits.detach().log_softmax(1).topk(4)
    ids[1], logprobs[1] = -1, -torch.inf
    for beta in (0.0, 0.5, 1.0):
        values, _, masses = tail_divergence(logits, ids, logprobs, beta=beta)
        assert values.tolist() == pytest.approx([0, 0], abs=1e-6)
        assert masses[1].item() == 0
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert gradient.abs().max().item() < 1e-6
