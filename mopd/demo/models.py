"""Tiny models of three families, with heads wider than their tokenizers."""

from typing import Any, Literal

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["qwen3", "llama", "gpt_neox"]

HIDDEN_SIZE = 96
LAYERS = 3
HEADS = 4
#: Heads are padded to a multiple of this, by at least one row, as in published models.
HEAD_MULTIPLE = 64
#: Longest prompt plus completion, in tokens.
MAX_TOKENS = 128


def build_model(family: Family, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a randomly initialized causal model for ``tokenizer``."""
    torch.manual_seed(seed)
    if family == "qwen3":
        return Qwen3ForCausalLM(
            Qwen3Config(
                **_sizes(tokenizer),
                num_key_value_heads=HEADS // 2,
                head_dim=HIDDEN_SIZE // HEADS,
                tie_word_embeddings=True,
            )
        )
    if family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**_sizes(tokenizer), num_key_value_heads=HEADS, tie_word_embeddings=True)
        )
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **_sizes(tokenizer),
            # The family's default rotates a quarter of each head: too little for 24 dimensions.
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        )
    )


def head_width(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the rows of the head: the next multiple above the tokenizer's size."""
    return (len(tokenizer) // HEAD_MULTIPLE + 1) * HEAD_MULTIPLE


def _sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": head_width(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 3 * HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
