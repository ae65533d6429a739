"""``likely_tokens``: the student's most likely tokens along a completion, for reports."""

from collections.abc import Sequence

import torch

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.student.student import Student


@torch.no_grad()
def likely_tokens(
    student: Student, prompt: Sequence[int], completion: Sequence[int], k: int
) -> TopKLogprobs | None:
    """Return the ``k`` most likely ids for each token of a completion, on rank 0, at temperature 1.

    Returns None if the logits are not finite.
    """
    rows = student.distributions(prompt, completion)
    logprobs, ids = rows.topk(min(k, student.table.size), dim=1)
    labels = torch.tensor(completion, device=rows.device, dtype=torch.int64)
    tokens = rows.gather(1, labels[:, None])[:, 0]
    if not bool(torch.isfinite(tokens).all()):
        return None
    rest = (1 - logprobs.double().exp().sum(dim=1)).clamp_min(0).log()
    ids = ids.masked_fill(logprobs == -torch.inf, -1)
    columns = (ids, logprobs, tokens, rest.float())
    return TopKLogprobs(*(column.cpu().numpy() for column in columns))
