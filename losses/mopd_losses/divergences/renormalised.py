"""Form A of a truncated divergence: each side's retained probabilities scaled to sum to one.

What either side says outside the retained ids has no influence: a single retained id compares
nothing, and mass that the student leaks to other ids costs nothing. In return no tail is needed,
and log-probabilities at one temperature give those at any other exactly: within the retained ids
they are logits. (losses: section 4.2, form A; ms-swift, ROLL, NeMo-RL.)
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def renormalised(
    logprobs: Float[Tensor, "rows k"], retained: Bool[Tensor, "rows k"]
) -> Float[Tensor, "rows k"]:
    """Log-probabilities given that the id is a retained one.

    Args:
        logprobs: [rows, k], nats, or any logits; read only where ``retained``.
        retained: bool [rows, k]; finite wherever it holds.

    Returns:
        [rows, k], nats; ``-inf``, without a gradient, where not retained.
    """
    # The lowest finite number, not -inf: a row that retains nothing must not differentiate to NaN.
    lowest = torch.finfo(logprobs.dtype).min
    kept = torch.nn.functional.pad(logprobs.masked_fill(~retained, lowest), (0, 1), value=lowest)
    total = kept.logsumexp(dim=1, keepdim=True)
    return torch.where(retained, logprobs - total, -torch.inf)
