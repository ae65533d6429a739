"""A teacher's scores at the temperature at which the student samples."""

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.topk_logprobs import TopKLogprobs

#: Nats; replaces the logarithm of zero, whose products and differences must be finite.
_LEAST_LOGPROB = -1e4

Nats = NDArray[np.float64]


def tempered(logprobs: NDArray[np.float32], topk: TopKLogprobs, temperature: float) -> Nats:
    """Return log-probabilities of the rows of ``topk`` at another temperature.

    A probability ``p`` becomes ``p ** (1 / temperature)``, divided by the sum of these over the
    top-k and the tail, which counts as one id. At temperature 1 nothing changes.

    Args:
        logprobs: [rows] or [rows, entries], nats.
        temperature: above 0.
    """
    raised = np.maximum(logprobs.astype(np.float64), _LEAST_LOGPROB) / temperature
    if temperature == 1:
        return raised
    every = np.column_stack([topk.logprobs, topk.tail_logprobs]).astype(np.float64)
    every = np.maximum(every, _LEAST_LOGPROB) / temperature
    peaks = every.max(axis=1)
    sums = np.log(np.exp(every - peaks[:, None]).sum(axis=1)) + peaks
    return raised - sums.reshape(-1, *[1] * (raised.ndim - 1))
