"""The language-model head as a matrix, if the model's head is one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.runtime.model_config import explaining_config, logit_scale, logit_soft_cap
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.student.attention import attention_of


@torch.no_grad()
def output_head(model: PreTrainedModel, table: TokenTable, real_ids: Tensor) -> Head | None:
    """Return the head with its scale and cap; None if the model changes logits in another way.

    Decided by comparing logits: some families scale or cap logits, some scale hidden states, and
    wrong logits would be silent.

    Args:
        real_ids: bool [width] on the model's device, False for rows without a token.

    Raises:
        ConfigError: when the model cannot be run, because values of its configuration are null.
    """
    model.eval()
    module: Any = model.get_output_embeddings()
    cap, scale = logit_soft_cap(model.config), logit_scale(model.config)
    head = Head(module.weight, real_ids, module.bias, scale, cap)
    present = np.flatnonzero(table.present)
    ids = torch.tensor(present[:: max(1, len(present) // 8)][:8], device=model.device)[None]
    decoder: Any = model.base_model
    # Flash attention exists in half precision only.
    half = attention_of(model).startswith("flash")
    with (
        torch.autocast(model.device.type, torch.bfloat16, enabled=half),
        explaining_config(f"{type(model).__name__} cannot be run", "model", model.config),
    ):
        hidden: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        expected = module(hidden) * scale
    expected = expected if cap is None else torch.tanh(expected / cap) * cap
    # Exact without scale and cap: a cap hardly changes the logits of a fresh model.
    tolerance = 0.0 if cap is None and scale == 1.0 else 1e-2 if half else 1e-5
    same = torch.allclose(
        expected[..., real_ids], logits[..., real_ids], rtol=tolerance, atol=tolerance
    )
    return head if same else None
