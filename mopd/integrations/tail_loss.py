"""``tail_divergence``: a divergence from a teacher's top-k and tail, of logits in any layout."""

import torch
from torch import Tensor

from mopd_losses.divergences.divergences import forward_kl, jensen_shannon, reverse_kl
from mopd_losses.divergences.truncation import floored_tail, log_mass, with_tail_bucket


def tail_divergence(
    logits: Tensor, ids: Tensor, logprobs: Tensor, *, beta: float = 0.0, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare a student with a teacher on the named ids and the rest, one bucket a side.

    Args:
        logits: [rows, width], the student's.
        ids: int [rows, k], student ids; those outside ``0 .. width - 1`` name nothing.
        logprobs: [rows, k], the teacher's, in nats; ``-inf`` for missing entries.
        beta: 0 is forward KL, 1 reverse KL; a Jensen-Shannon divergence between, with ``beta`` as
            the teacher's weight.
        temperature: divides the logits; the teacher's log-probabilities have it already.

    Returns:
        [rows] each: the divergence in nats, and the student's and the teacher's mass on the named
        ids. A row without entries has a divergence of 0.
    """
    width = logits.shape[1]
    retained = (ids >= 0) & (ids < width) & ~torch.isneginf(logprobs)
    ids = ids.long().masked_fill(~retained, 0)
    rows = logits.float() / temperature
    student = rows.gather(1, ids) - rows.logsumexp(1, keepdim=True)
    teacher = logprobs.float().masked_fill(~retained, -torch.inf)
    named = log_mass(teacher)
    tail = (1 - named.exp()).clamp(min=2**-24).log()  # the resolution of a sum in float32
    masses = log_mass(student.detach().masked_fill(~retained, -torch.inf)).exp(), named.exp()
    student, teacher = with_tail_bucket(student, teacher, tail, retained)
    if beta == 0:
        return forward_kl(student, teacher), *masses
    teacher = floored_tail(student, teacher)
    if beta == 1:
        return reverse_kl(student, teacher), *masses
    return jensen_shannon(student, teacher, teacher_weight=beta), *masses
