"""Model folders whose weights are not those of a complete causal language model, and sound ones."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from tests import tiny_models

Tensors = dict[str, Tensor]

_LAYER = "model.layers.1.mlp.up_proj.weight"


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def _with_stored_tied_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


#: Name -> change of the tensors, and the tensor that the error names.
DAMAGED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing layer": (_without(_LAYER), _LAYER),
    "missing head": (_without("lm_head.weight"), "lm_head.weight"),
    "missing norm": (_without("model.norm.weight"), "model.norm.weight"),
    "stray layer": (_with("model.layers.7.mlp.up_proj.weight", 3, 3), "model.layers.7.mlp"),
    "another shape": (_with("model.norm.weight", 7), "model.norm.weight"),
}
SOUND: dict[str, Callable[[Tensors], object]] = {
    "tensors that are computed now": lambda tensors: (
        _with("model.layers.0.self_attn.rotary_emb.inv_freq", 8)(tensors),
        _with("model.embeddings.position_ids", 1, 8)(tensors),
    ),
    "tied": lambda tensors: None,
    "tied, head stored too": _with_stored_tied_head,
    "sharded": lambda tensors: None,
}


def damaged(name: str, folder: Path) -> Path:
    """Save a folder of ``DAMAGED``, ``SOUND``, or a ``reward model`` (``tied reward model``)."""
    tokenizer = tiny_models.digit_tokenizer()
    config = Qwen3Config.from_dict(
        # 32 is the smallest head of vLLM's CPU attention.
        {**tiny_models.qwen(tokenizer).config.to_dict(), "head_dim": 32}
    )
    config.tie_word_embeddings = "tied" in name
    if "reward" in name:
        config.num_labels = 1
        return tiny_models.save(Qwen3ForSequenceClassification(config), tokenizer, folder)
    tiny_models.save(Qwen3ForCausalLM(config), tokenizer, folder)
    if name == "sharded":
        (folder / "model.safetensors").unlink()
        Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
        return folder
    tensors = load_file(folder / "model.safetensors")
    (SOUND.get(name) or DAMAGED[name][0])(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
