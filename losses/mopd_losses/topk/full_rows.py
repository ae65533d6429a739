"""A teacher's whole distributions in place of its top-k, for a teacher on the same machine."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_losses.core.span_targets import SpanTargets


def with_full_rows(
    targets: SpanTargets, teacher_logits: Float[Tensor, "rows teacher_size"]
) -> SpanTargets:
    """The targets with every id of every row: most likely first, and nothing in the tail.

    Args:
        targets: of ``span_targets`` or ``mergeable_targets``.
        teacher_logits: [rows, teacher size], cut to the teacher's ids.
    """
    logits = teacher_logits if teacher_logits.dtype == torch.float64 else teacher_logits.float()
    logprobs = logits.log_softmax(dim=1)
    ordered, ids = logprobs.sort(dim=1, descending=True)
    return replace(
        targets,
        token_logprobs=logprobs.gather(1, targets.teacher_ids[:, None]).squeeze(1),
        topk_ids=ids.masked_fill(torch.isneginf(ordered), -1),
        topk_logprobs=ordered,
        tail_logprobs=torch.full_like(ordered[:, 0], -torch.inf),
    )
