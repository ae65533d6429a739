"""Loss of a step with reference answers and rollouts, one context and one token at a time.

A token of a reference answer costs ``(1 - w) * -ln p(token) + w * KD``, one that the student
generated costs ``KD``; the loss is the sum over all tokens of the step, by their number.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def cross_entropy(
    model: PreTrainedModel, prompt: list[int], completion: list[int], real: list[int]
) -> Tensor:
    """[tokens], nats: each token's own whole forward pass, softmax over the real ids only."""
    costs: list[Tensor] = []
    for row, token in enumerate(completion):
        logits = model(torch.tensor([[*prompt, *completion[:row]]])).logits[0, -1]
        costs.append(-(logits[token].exp() / logits[real].exp().sum()).log())
    return torch.stack(costs)


def token_costs(
    labelled: Tensor | None, distilled: Tensor | None, distill_loss_weight: float
) -> Tensor:
    """[tokens] of one completion; ``labelled`` is None for a rollout of the student."""
    if labelled is None:
        assert distilled is not None
        return distilled
    if distilled is None:
        return (1 - distill_loss_weight) * labelled
    return (1 - distill_loss_weight) * labelled + distill_loss_weight * distilled
