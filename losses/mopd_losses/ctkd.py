"""CTKD: cross-tokenizer distillation from a teacher's top-k through a projection matrix.

The student's next-token distribution is projected on the teacher's vocabulary and compared with
the teacher's truncated one at the start of every aligned span; whatever either side has outside
the ids that both can name is one tail bucket. With the identity for a projection, this *is* the
same-vocabulary top-k KL. (X-Token's P-KL, arXiv 2605.21699, on first rows and with a tail bucket
in place of renormalisation.)
"""

from typing import Literal

import torch
from torch import Tensor

from mopd_losses.loss_output import LossOutput
from mopd_losses.projected_logprobs import projected_logprobs
from mopd_losses.projection_cache import DeviceProjection
from mopd_losses.tail_bucket import student_tail, tail_forward_kl, tail_reverse_kl
from mopd_losses.topk_targets import TopKTargets
from mopd_protocol.errors import DataError

Divergence = Literal["forward_kl", "reverse_kl"]
_DIVERGENCES = {"forward_kl": tail_forward_kl, "reverse_kl": tail_reverse_kl}


def ctkd(
    logits: Tensor,
    targets: TopKTargets,
    projection: DeviceProjection,
    *,
    divergence: Divergence = "forward_kl",
    temperature: float = 1.0,
) -> LossOutput:
    """Nats per student token; a span's divergence stands at the span's first token.

    Args:
        logits: [tokens, student width]; row r predicts student token r.
        targets: the teacher at the start of each span, at the same ``temperature``.
        projection: student ids -> teacher ids, on the logits' device.
        temperature: softmax temperature of both sides; the value is multiplied by its square, so
            that gradients keep their size (Hinton et al. 2015).

    Returns:
        ``measured``: ``teacher_mass`` and ``student_mass`` on the compared ids,
        ``unsupported_mass`` of the teacher on ids that no student token reaches, and
        ``unprojected_mass`` of the student on ids that reach no teacher token.

    Raises:
        DataError: when the logits' width is not the projection's.
    """
    if logits.shape[1] != len(projection.real_ids):
        raise DataError(
            f"logits of width {logits.shape[1]} for a projection of "
            f"{len(projection.real_ids)} rows; build the projection for this student's head"
        )
    # Half precision is raised before any exp or log; float64 stays, for gradient checks.
    rows = logits[targets.slots]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    rows = rows.masked_fill(~projection.real_ids, -torch.inf)
    # From the row's peak: normalisers are then small, and a tail of 1e-5 survives float32.
    rows = (rows - rows.detach().amax(dim=1, keepdim=True)) / temperature
    log_normalisers = rows.logsumexp(dim=1)
    student = projected_logprobs(rows, log_normalisers, targets.ids, projection)
    teacher = targets.logprobs.to(rows.dtype)
    retained = ~torch.isneginf(student) & ~torch.isneginf(teacher)
    unsupported = _log_mass(teacher.masked_fill(retained, -torch.inf))
    teacher_tail = torch.logaddexp(targets.tail_logprobs.to(rows.dtype), unsupported)
    # A row that compares nothing is all tail, also where the teacher said nothing whatever.
    teacher_tail = teacher_tail.masked_fill(~retained.any(dim=1), 0.0)
    values = _DIVERGENCES[divergence](student, teacher, teacher_tail, retained)
    # The sum of nothing: a zero for every token that hangs in the graph even when no span does.
    per_token = logits[:, :0].sum(dim=1).to(values.dtype)
    per_token = per_token.index_add(0, targets.slots, values * temperature**2)
    with torch.no_grad():
        unprojected = rows[:, projection.unprojected_ids] - log_normalisers.unsqueeze(1)
        measured = {
            "teacher_mass": -torch.expm1(teacher_tail.clamp_max(0)),
            "student_mass": -torch.expm1(student_tail(student, retained)),
            "unsupported_mass": unsupported.exp(),
            "unprojected_mass": unprojected.exp().sum(dim=1),
        }
    return LossOutput(per_token, measured)


def _log_mass(logprobs: Tensor) -> Tensor:
    """[places], log of the summed probabilities of each row; -inf for none."""
    return torch.nn.functional.pad(logprobs, (0, 1), value=-torch.inf).logsumexp(dim=1)
