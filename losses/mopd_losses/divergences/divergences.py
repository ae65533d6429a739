"""Divergences between two next-token distributions, given as log-probabilities.

Every function takes ``student`` and ``teacher`` of shape [rows, entries], natural logs, and returns
[rows] nats. Entries are all ids of one vocabulary (two models of one tokenizer on one machine), or
what a truncation left of it (``topk_divergence``). Gradients flow to both sides; detach the
teacher. In float32 or float64: raise *logits* to float32 before the log-softmax, for log-
probabilities rounded to half precision no longer sum to one.

``-inf`` is a probability of zero. Where both sides are zero (padding of the head) an entry adds
nothing, to the value and to any gradient. Where only one does, the bounded divergences are exact
and finite, and a KL that is infinite is returned as ``inf``: compare two models that rule out
different ids on their common ids, with ``renormalised``. NaN stays NaN.

With ``z`` the student's logits, ``p = softmax(z)`` and ``t`` the teacher's probabilities (losses:
section 4.1; none is multiplied by a temperature here).
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.config import DivergenceSettings

#: (student, teacher), log-probabilities [rows, entries] -> nats [rows].
DivergenceFunction = Callable[[Tensor, Tensor], Tensor]


def divergence_of(settings: DivergenceSettings) -> DivergenceFunction:
    """The divergence that the settings name, with its own parameter."""
    match settings.divergence:
        case "forward_kl":
            return forward_kl
        case "reverse_kl":
            return reverse_kl
        case "jsd":
            return partial(jensen_shannon, teacher_weight=settings.teacher_weight)
        case "adaptive_kl":
            return partial(adaptive_kl, tail_mass=settings.tail_mass)
        case "entropy_aware_kl":
            return partial(entropy_aware_kl, threshold=settings.entropy_threshold)
        case "skewed_forward_kl":
            return partial(skewed_forward_kl, skew=settings.skew)
        case "skewed_reverse_kl":
            return partial(skewed_reverse_kl, skew=settings.skew)
        case "tvd":
            return total_variation


def teacher_share(settings: DivergenceSettings) -> float:
    """The teacher's share of the distribution over which the divergence is an expectation.

    By the chain rule the divergence of a pair of events is that of the first one plus the expected
    one of the second, given the first: over the teacher for forward KL, the student for reverse KL,
    the mixture for the Jensen-Shannon divergence. For others it is an approximation.
    """
    match settings.divergence:
        case "forward_kl" | "skewed_forward_kl":
            return 1.0
        case "reverse_kl" | "skewed_reverse_kl":
            return 0.0
        case "jsd":
            weight = settings.teacher_weight
            return weight if 0 < weight < 1 else 1.0 - weight
        case "adaptive_kl" | "entropy_aware_kl" | "tvd":
            return 0.5


def forward_kl(
    student: Float[Tensor, "rows entries"], teacher: Float[Tensor, "rows entries"]
) -> Float[Tensor, "rows"]:
    """``KL(t || p) = sum t (ln t - ln p)``; by the logits: ``p - t``."""
    return _kl(teacher, student)


def reverse_kl(
    student: Float[Tensor, "rows entries"], teacher: Float[Tensor, "rows entries"]
) -> Float[Tensor, "rows"]:
    """``KL(p || t) = sum p (ln p - ln t)``; by the logits: ``p (ln p - ln t - KL)``.

    Unbounded as the teacher's probability of an id that is likely for the student vanishes.
    """
    return _kl(student, teacher)


def jensen_shannon(
    student: Float[Tensor, "rows entries"],
    teacher: Float[Tensor, "rows entries"],
    *,
    teacher_weight: float,
) -> Float[Tensor, "rows"]:
    """``w KL(t || m) + (1 - w) KL(p || m)`` with the mixture ``m = w t + (1 - w) p``.

    At most the binary entropy of ``w``. ``teacher_weight`` is spelled out because the literature's
    beta is the teacher's share in some codebases (TRL, ms-swift, Liger: this one) and the student's
    in others (KDFlow).

    As ``w`` goes to 0 this falls to zero as ``w * forward_kl``, and as ``w`` goes to 1 as
    ``(1 - w) * reverse_kl``; *at* 0 and 1 it is by convention ``forward_kl`` and ``reverse_kl``
    themselves, unscaled. So 0 and 0.0001 differ by four orders of magnitude: do not anneal to an
    end.

    Args:
        teacher_weight: from 0 to 1.
    """
    if teacher_weight == 0:
        return forward_kl(student, teacher)
    if teacher_weight == 1:
        return reverse_kl(student, teacher)
    mixture = log_mixture(teacher, student, teacher_weight)
    return teacher_weight * _kl(teacher, mixture) + (1 - teacher_weight) * _kl(student, mixture)


def skewed_forward_kl(
    student: Float[Tensor, "rows entries"], teacher: Float[Tensor, "rows entries"], *, skew: float
) -> Float[Tensor, "rows"]:
    """``KL(t || skew * t + (1 - skew) * p)``; at most ``-ln skew``, and forward KL at 0.

    (DistiLLM, arXiv 2402.03898; ROLL and KDFlow.)

    Args:
        skew: the teacher's share of the mixture, from 0 to below 1.
    """
    if skew == 0:
        return forward_kl(student, teacher)
    return _kl(teacher, log_mixture(teacher, student, skew))


def skewed_reverse_kl(
    student: Float[Tensor, "rows entries"], teacher: Float[Tensor, "rows entries"], *, skew: float
) -> Float[Tensor, "rows"]:
    """``KL(p || skew * p + (1 - skew) * t)``; at most ``-ln skew``, and reverse KL at 0.

    Args:
        skew: the student's share of the mixture, from 0 to below 1.
    """
    if skew == 0:
        return reverse_kl(student, teacher)
    return _kl(student, log_mixture(student, teacher, skew))


def adaptive_kl(
    student: Float[Tensor, "rows entries"],
    teacher: Float[Tensor, "rows entries"],
    *,
    tail_mass: float,
) -> Float[Tensor, "rows"]:
    """Forward and reverse KL, mixed by where the two differ: ``h FKL + (1 - h) RKL``.

    The tail is the teacher's least likely ids with a mass of up to ``tail_mass`` together, the head
    the others; ``h`` is the head's share of ``sum |t - p|``, a constant of the gradient. Ids of one
    probability are in the tail together or not at all, so that the order of ids never matters.
    Where the sides agree everywhere ``h`` is 0 / 0 and taken as 1/2, of two divergences that are
    zero. The value is not what the gradient descends. (AKL, arXiv 2404.02657; ROLL and KDFlow.)

    Args:
        tail_mass: above 0, below 1.
    """
    with torch.no_grad():
        p, t = student.exp(), teacher.exp()
        gaps = (t - p).abs()
        total = gaps.sum(dim=-1)
        in_head = gaps.masked_fill(_mass_up_to(t) <= tail_mass, 0.0).sum(dim=-1)
        differ = total > 0
        head_share = torch.where(differ, in_head / torch.where(differ, total, 1.0), 0.5)
    forward, reverse = forward_kl(student, teacher), reverse_kl(student, teacher)
    return head_share * forward + (1 - head_share) * reverse


def entropy_aware_kl(
    student: Float[Tensor, "rows entries"],
    teacher: Float[Tensor, "rows entries"],
    *,
    threshold: float,
) -> Float[Tensor, "rows"]:
    """Reverse KL, plus forward KL where the teacher's entropy is above a threshold.

    The entropy is that of the entries, so of a top-k with its rest as one entry it is a lower
    bound. It decides by the teacher only and has no gradient. (EOPD, arXiv 2603.07079, whose
    threshold is 0.8 nats; its reverse KL is estimated from the sampled token.)

    Args:
        threshold: nats, at least 0; above the log of the number of entries it is reverse KL.
    """
    with torch.no_grad():
        surprisals = -teacher.masked_fill(torch.isneginf(teacher), 0.0)
        uncertain = (teacher.exp() * surprisals).sum(dim=-1) > threshold
    # Equal sides where the teacher is certain: a forward KL of inf times zero would be NaN.
    compared = torch.where(uncertain.unsqueeze(-1), student, teacher)
    return reverse_kl(student, teacher) + forward_kl(compared, teacher)


def total_variation(
    student: Float[Tensor, "rows entries"], teacher: Float[Tensor, "rows entries"]
) -> Float[Tensor, "rows"]:
    """``1/2 sum |p - t|``, from 0 to 1; its subgradient where two probabilities agree is zero."""
    return 0.5 * (student.exp() - teacher.exp()).abs().sum(dim=-1)


def _kl(
    first: Float[Tensor, "rows entries"], second: Float[Tensor, "rows entries"]
) -> Float[Tensor, "rows"]:
    """``sum first (ln first - ln second)``; inputs are masked, never products (0 * inf is NaN)."""
    impossible = first.exp() == 0  # also underflow, which may have an infinite gap; never NaN
    gaps = first.masked_fill(impossible, 0.0) - second.masked_fill(impossible, 0.0)
    return (first.masked_fill(impossible, -torch.inf).exp() * gaps).sum(dim=-1)


def log_mixture(
    first: Float[Tensor, "*entries"], second: Float[Tensor, "*entries"], first_share: float
) -> Float[Tensor, "*entries"]:
    """``ln(share * first + (1 - share) * second)``; no small number is ever added inside a log.

    From the larger of the two: where both agree nothing is added to it, which logs of the shares
    would round, and a share may be too small for the dtype.
    """
    neither = torch.isneginf(first) & torch.isneginf(second)
    first, second = first.masked_fill(neither, 0.0), second.masked_fill(neither, 0.0)
    from_first = first >= second
    larger = torch.where(from_first, first, second)
    gap = torch.where(from_first, second, first) - larger
    # Tensors of the same dtype: two plain numbers would make float32, which rounds 0.1.
    own, other = larger.new_tensor([first_share, 1 - first_share])
    larger_share = torch.where(from_first, own, other)
    smaller_share = torch.where(from_first, other, own)
    mixture = larger + torch.log(larger_share + smaller_share * gap.exp())
    return mixture.masked_fill(neither, -torch.inf)


def _mass_up_to(probabilities: Float[Tensor, "rows entries"]) -> Float[Tensor, "rows entries"]:
    """[rows, entries], the mass of all entries of the row that are not more likely than this."""
    ascending, order = probabilities.sort(dim=-1)
    masses = ascending.cumsum(dim=-1)
    # The last of equal entries has the mass of all of them; masses only grow after it.
    more_follow = torch.zeros_like(masses, dtype=torch.bool)
    more_follow[..., :-1] = ascending[..., :-1] == ascending[..., 1:]
    last_of_equals = masses.masked_fill(more_follow, torch.inf)
    masses = last_of_equals.flip(-1).cummin(dim=-1).values.flip(-1)
    return torch.empty_like(masses).scatter_(-1, order, masses)
