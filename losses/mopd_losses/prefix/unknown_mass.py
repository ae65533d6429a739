"""Distributions of which some mass is known only by an upper bound.

Entries may lack mass, together at most the bound. Filling them towards the other side's shares,
as far as the bound allows, gives the distribution among all possible ones that differs least: two
sides that agree differ by nothing, and what a side is sure of is compared as it is.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: Alternations between both sides, where both lack mass.
_ALTERNATIONS = 3

#: Nats: smaller shares are never filled, and larger bounds are no bounds; squares stay finite.
_LEAST_SHARE, _HIGHEST_BOUND = -27.0, 27.0


def filled_sides(
    student: Float[Tensor, "boundaries entries"],
    teacher: Float[Tensor, "boundaries entries"],
    student_lacks: tuple[Bool[Tensor, "boundaries entries"], Float[Tensor, "boundaries"]],
    teacher_lacks: tuple[Bool[Tensor, "boundaries entries"], Float[Tensor, "boundaries"]],
) -> tuple[Float[Tensor, "boundaries entries"], Float[Tensor, "boundaries entries"]]:
    """Fill both sides towards each other: log-probabilities.

    Args:
        student: [boundaries, entries], log-probabilities of what is known.
        student_lacks: the entries that may lack mass, and the bound as the log of a multiple of
            the known mass.
    """
    student_filled, teacher_filled = student, teacher
    for _ in range(_ALTERNATIONS):
        teacher_filled = filled(teacher, student_filled, *teacher_lacks)
        student_filled = filled(student, teacher_filled, *student_lacks)
    return student_filled, teacher_filled


def filled(
    known: Float[Tensor, "boundaries entries"],
    towards: Float[Tensor, "boundaries entries"],
    lacking: Bool[Tensor, "boundaries entries"],
    bound: Float[Tensor, "boundaries"],
) -> Float[Tensor, "boundaries entries"]:
    """Fill lacking entries to ``max(known, level * towards)`` and scale the result to one.

    The level is the highest at which the added mass is within the bound and no entry exceeds its
    share in ``towards``. The mass added at a level is the maximum of ``level * T - S`` over the
    prefixes of entries by ascending known / towards, with sums T and S: so both limits have a
    closed form.

    Returns:
        [boundaries, entries], log-probabilities.
    """
    bounded = ~torch.isneginf(bound).unsqueeze(1)
    total = known.logsumexp(dim=1, keepdim=True)  # above one by the margin of a rest
    known = torch.where(bounded, known - total, known)
    reachable = lacking & (towards > _LEAST_SHARE)
    known_mass = torch.where(reachable, known.exp(), 0.0)
    towards_mass = torch.where(reachable, towards.exp(), 0.0)
    ratios = torch.where(reachable, known.detach() - towards.detach(), torch.inf)
    order = ratios.argsort(dim=1)
    known_sums = known_mass.gather(1, order).cumsum(dim=1)
    towards_sums = towards_mass.gather(1, order).cumsum(dim=1)
    limit = bound.clamp_max(_HIGHEST_BOUND).exp().unsqueeze(1)
    reached = towards_sums > 0
    by_bound = (limit + known_sums) / torch.where(reached, towards_sums, 1.0)
    by_bound = torch.where(reached, by_bound, torch.inf).amin(dim=1)
    rest = (1 - towards_sums).clamp_min(torch.finfo(known.dtype).eps)
    by_share = ((1 - known_sums).clamp_min(0) / rest).amax(dim=1).clamp_min(1.0)
    level = torch.minimum(by_bound, by_share)
    level = level.clamp_min(torch.finfo(known.dtype).tiny).log().unsqueeze(1)
    raised = reachable & bounded & (level + towards > known)
    result = torch.where(raised, level + towards.masked_fill(~raised, 0.0), known)
    return torch.where(bounded, result - result.logsumexp(dim=1, keepdim=True), known)
