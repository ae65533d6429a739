"""Several teachers of one vocabulary as one: the product of their distributions.

    ln t(v) = sum over i of w_i ln t_i(v) - ln Z,        w summing to one

which is the mean of their logits, and the distribution of least mean KL *to* the teachers,
``sum w_i KL(t || t_i)``. It says only what all of them can say. Ids must mean the same everywhere:
teachers of different vocabularies are not multiplied, their losses are added.
(losses: section 9, point 7.)
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mopd_protocol.errors import DataError


def product_of_experts(
    logprobs: Sequence[Float[Tensor, "rows _"]],
    weights: Sequence[float],
    *,
    fingerprints: Sequence[str],
) -> Float[Tensor, "rows vocabulary"]:
    """[rows, vocabulary], nats, in the widest of the teachers' dtypes and float32.

    Args:
        logprobs: [rows, vocabulary] for each teacher, natural logs (or logits).
        weights: above zero; normalised to sum to one.
        fingerprints: of each teacher's tokenizer.

    Raises:
        DataError: for no teacher, teachers of different tokenizers, widths or rows, a weight not
            above zero, or a row in which there is no id that all of them can say.
    """
    if not len(logprobs) == len(weights) == len(fingerprints) > 0:
        raise DataError(
            f"{len(logprobs)} teachers with {len(weights)} weights and {len(fingerprints)} "
            "fingerprints: expected one of each, for at least one teacher"
        )
    if len(set(fingerprints)) > 1:
        raise DataError(
            f"teachers with tokenizers {', '.join(name[:12] for name in fingerprints)} have no "
            "product; multiply teachers of one tokenizer, and add the losses of others"
        )
    shapes = [tuple(teacher.shape) for teacher in logprobs]
    if len(set(shapes)) > 1:
        raise DataError(
            f"teachers' log-probabilities have shapes {', '.join(map(str, shapes))}; expected one "
            "[rows, vocabulary], without padding rows of the heads"
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise DataError(f"teachers have weights {list(weights)}; expected each above 0 and finite")
    total = sum(weights)
    product = torch.zeros_like(logprobs[0], dtype=torch.float32)
    for teacher, weight in zip(logprobs, weights, strict=True):
        product = product + weight / total * teacher
    nothing = torch.isneginf(product).all(dim=1)
    if nothing.any():
        row = int(torch.nonzero(nothing)[0])
        raise DataError(f"row {row}: the teachers can say no id in common, so they have no product")
    return product.log_softmax(dim=1)
