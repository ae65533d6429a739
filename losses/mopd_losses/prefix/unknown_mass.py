"""Distributions of which some mass is known only by an upper bound.

Entries may lack mass, together at most the bound, and an entry at most a share of what the other
side has of it. Filling them towards the other side's shares, as far as the bounds allow, gives the
distribution among all possible ones that differs least: two sides that agree differ by nothing, and
what a side is sure of is compared as it is.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

#: Alternations between both sides, where both lack mass.
_ALTERNATIONS = 3

#: Entries of a boundary that are limited, at most.
_LIMITED = 2

#: Nats: smaller shares are never filled, and larger bounds are no bounds; squares stay finite.
_LEAST_SHARE, _HIGHEST_BOUND = -27.0, 27.0

#: Least share of an entry's other texts.
_LEAST_OTHERS = 1e-12


@dataclass(frozen=True, eq=False)
class UnknownMass:
    """Mass of one side that is in none of its known entries."""

    missing: Float[Tensor, "boundaries entries"]
    """Nats, of the other side's mass of an entry: the most that is missing. -inf for nothing, 0 for
    any mass; between them at most two entries of a boundary."""
    bound: Float[Tensor, "boundaries"]
    """Nats, of the known mass: the most that is missing of all entries."""
    least: Float[Tensor, "boundaries"]
    """Nats, of the known mass: the least that is missing. It only counts where the most is missing
    of an entry; else all of it can be where the other side has its mass. What of it is in the rest
    has a gradient, whereas the bound is a constant."""


def other_texts(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nats of what texts with some shares of an entry leave to others. Never nothing:
    that is an entry without missing mass."""
    return np.log1p(-np.clip(shares, 0.0, 1 - _LEAST_OTHERS))


def filled_sides(
    student: Float[Tensor, "boundaries entries"],
    teacher: Float[Tensor, "boundaries entries"],
    student_missing: UnknownMass,
    teacher_missing: UnknownMass,
) -> tuple[Float[Tensor, "boundaries entries"], Float[Tensor, "boundaries entries"]]:
    """Fill both sides towards each other: log-probabilities.

    Args:
        student: [boundaries, entries], log-probabilities of what is known.
    """
    student_filled, teacher_filled = student, teacher
    for _ in range(_ALTERNATIONS):
        teacher_filled = filled(teacher, student_filled, teacher_missing)
        student_filled = filled(student, teacher_filled, student_missing)
    return student_filled, teacher_filled


def filled(
    known: Float[Tensor, "boundaries entries"],
    towards: Float[Tensor, "boundaries entries"],
    unknown: UnknownMass,
) -> Float[Tensor, "boundaries entries"]:
    """Fill entries to ``max(known, level * towards)`` where mass is missing, and scale to one.

    The level is the highest at which the added mass is within the bound and no entry exceeds its
    share in ``towards``. If all of ``least`` is added at a level, and an entry would then lack more
    than its most, it gets that, and the others what is left.

    Args:
        known: the last entry is the rest, as in ``towards``: it may lack any mass.

    Returns:
        [boundaries, entries], log-probabilities.
    """
    bounded = ~torch.isneginf(unknown.bound).unsqueeze(1)
    total = known.logsumexp(dim=1, keepdim=True)  # above one by the margin of a rest
    known = torch.where(bounded, known - total, known)
    bound = unknown.bound.clamp_max(_HIGHEST_BOUND).exp().unsqueeze(1)
    reachable = bounded & ~torch.isneginf(unknown.missing) & (towards > _LEAST_SHARE)
    result = _raised(known, towards, reachable, bound)
    limited = reachable & (unknown.missing < 0)
    rows = limited.any(dim=1).nonzero().squeeze(1)
    if len(rows):
        least = unknown.least[rows].detach().clamp_max(_HIGHEST_BOUND).exp().unsqueeze(1)
        sides, within = (known[rows], _with_some_rest(towards[rows])), bound[rows]
        limits = unknown.missing[rows].exp() * sides[1].exp() * (1 + within)
        limits = sides[0].exp() + limits.detach()
        can_lack = bounded[rows] & ~torch.isneginf(unknown.missing[rows])
        can_lack = can_lack & (sides[1] >= _LEAST_SHARE)
        levels = limits / sides[1].exp()
        exceeds = torch.zeros_like(can_lack)
        complete = sides[0]
        for _ in range(_LIMITED + 1):
            complete = _with_limits(*sides, can_lack, within, least, limits, exceeds)
            # The entry with the lowest level first: it changes what is left to the others.
            over = limited[rows] & ~exceeds & (complete.exp() > limits)
            if not over.any():
                break
            lowest = torch.where(over, levels, torch.inf).amin(dim=1, keepdim=True)
            exceeds = exceeds | (over & (levels == lowest))
        chosen = exceeds.any(dim=1)
        result = result.index_copy(0, rows[chosen], complete[chosen])
    result = _with_certain_rest(result, known, unknown.least)
    return torch.where(bounded, result - result.logsumexp(dim=1, keepdim=True), known)


def _with_some_rest(
    towards: Float[Tensor, "boundaries entries"],
) -> Float[Tensor, "boundaries entries"]:
    """Raise the last entry to the least share that is filled: certain mass is somewhere."""
    return torch.cat([towards[:, :-1], towards[:, -1:].clamp_min(_LEAST_SHARE)], dim=1)


def _with_certain_rest(
    result: Float[Tensor, "boundaries entries"],
    known: Float[Tensor, "boundaries entries"],
    certain: Float[Tensor, "boundaries"],
) -> Float[Tensor, "boundaries entries"]:
    """Give the certain mass in the rest its gradient; no value changes.

    In the rest, it is mass like any other: if the side has more of it, its rest is larger. In an
    entry, it is one of several explanations of the other side's mass, and a constant as the bound
    is. The certain part of the added mass is the same in the rest as in the entries.

    Args:
        result: before it is scaled to one.
    """
    masses = result.detach().exp()
    added = (masses - known.detach().exp()).clamp_min(0.0)
    rest, is_certain = added[:, -1], ~torch.isneginf(certain)
    in_rest = torch.where(is_certain & (rest > 0), rest / masses[:, -1], 0.0)
    in_rest = in_rest * (certain.detach().exp() / added.sum(dim=1)).clamp_max(1.0).nan_to_num()
    change = torch.where(is_certain, certain - certain.detach(), 0.0)  # 0, with a gradient
    return torch.cat([result[:, :-1], (result[:, -1] + in_rest * change).unsqueeze(1)], dim=1)


def _with_limits(
    known: Float[Tensor, "boundaries entries"],
    towards: Float[Tensor, "boundaries entries"],
    reachable: Bool[Tensor, "boundaries entries"],
    bound: Float[Tensor, "boundaries 1"],
    least: Float[Tensor, "boundaries 1"],
    limits: Float[Tensor, "boundaries entries"],
    exceeds: Bool[Tensor, "boundaries entries"],
) -> Float[Tensor, "boundaries entries"]:
    """Raise the entries that exceed their limits to these, and others by what is left.

    Args:
        limits: [boundaries, entries], probabilities.
    """
    added = torch.where(exceeds, limits - known.exp(), 0.0).sum(dim=1, keepdim=True)
    return _raised(
        torch.where(exceeds, torch.where(exceeds, limits, 1.0).log(), known),
        towards,
        reachable & ~exceeds,
        (bound - added).clamp_min(0.0),
        (least - added).clamp_min(0.0),
    )


def _raised(
    known: Float[Tensor, "boundaries entries"],
    towards: Float[Tensor, "boundaries entries"],
    reachable: Bool[Tensor, "boundaries entries"],
    bound: Float[Tensor, "boundaries 1"],
    least: Float[Tensor, "boundaries 1"] | None = None,
) -> Float[Tensor, "boundaries entries"]:
    """Raise reachable entries to a level of ``towards``, the highest at which the added mass is
    within the bound and no entry exceeds its share, or at which it is ``least``.

    The mass added at a level is the maximum of ``level * T - S`` over the prefixes of entries by
    ascending known / towards, with sums T and S: so all limits have a closed form.

    Args:
        bound: [boundaries, 1], probabilities, as ``least``.
    """
    known_mass = torch.where(reachable, known.exp(), 0.0)
    towards_mass = torch.where(reachable, towards.exp(), 0.0)
    ratios = torch.where(reachable, known.detach() - towards.detach(), torch.inf)
    order = ratios.argsort(dim=1)
    known_sums = known_mass.gather(1, order).cumsum(dim=1)
    towards_sums = towards_mass.gather(1, order).cumsum(dim=1)
    reached = towards_sums > 0

    def level_of(added: Tensor) -> Tensor:
        levels = (added + known_sums) / torch.where(reached, towards_sums, 1.0)
        return torch.where(reached, levels, torch.inf).amin(dim=1)

    rest = (1 - towards_sums).clamp_min(torch.finfo(known.dtype).eps)
    others = known.exp().sum(dim=1, keepdim=True) - known_sums
    by_share = (others.clamp_min(0) / rest).amax(dim=1).clamp_min(1.0)
    level = torch.minimum(level_of(bound), by_share)
    if least is not None:
        has_least = (least.squeeze(1) > 0) & reached.any(dim=1)
        level = torch.maximum(level, torch.where(has_least, level_of(least), 0.0))
    level = level.clamp_min(torch.finfo(known.dtype).tiny).log().unsqueeze(1)
    raised = reachable & (level + towards > known)
    return torch.where(raised, level + towards.masked_fill(~raised, 0.0), known)
