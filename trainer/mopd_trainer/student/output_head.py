"""A model's language-model head as a matrix, where it is one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.tokenizers.token_table import TokenTable


@torch.no_grad()
def output_head(model: PreTrainedModel, table: TokenTable, real_ids: Tensor) -> Head | None:
    """The head with what families do to its output; None where they do more.

    Decided by looking: some families scale or cap logits, some scale hidden states, and other
    logits than the model's own would go wrong without a word.

    Args:
        real_ids: bool [width] on the model's device, False for rows that belong to no token.
    """
    model.eval()
    module: Any = model.get_output_embeddings()
    settings = model.config.get_text_config().to_dict()
    cap: float | None = settings.get("final_logit_softcapping")
    scale = settings.get("logit_scale", 1.0) / settings.get("logits_scaling", 1.0)
    head = Head(module.weight, real_ids, module.bias, scale, cap)
    known = np.flatnonzero(table.present)
    ids = torch.tensor(known[:: max(1, len(known) // 8)][:8], device=model.device)[None]
    decoder: Any = model.base_model
    hidden: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    made = module(hidden) * scale
    made = made if cap is None else torch.tanh(made / cap) * cap
    # Bit for bit where nothing is said to happen: a cap hardly moves a fresh model's logits.
    tolerance = 0.0 if cap is None and scale == 1.0 else 1e-5
    same = torch.allclose(
        made[..., real_ids], logits[..., real_ids], rtol=tolerance, atol=tolerance
    )
    return head if same else None
