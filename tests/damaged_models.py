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


def _with_another_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])


def _with_nan(tensors: Tensors) -> None:
    """Damage the row of one token, which no check that scores a few tokens has to reach."""
    tensors["model.embed_tokens.weight"][399, 0] = torch.nan


def _with_empty_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"].zero_()


def _with_integers(tensors: Tensors) -> None:
    tensors[_LAYER] = (tensors[_LAYER] * 1000).to(torch.int8)


_SHARDS = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
_INDEX = "model.safetensors.index.json"


def _cut(folder: Path) -> None:
    shard = folder / _SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])


def _replace_by_page(folder: Path) -> None:
    (folder / _SHARDS[1]).write_text("<html>Log in first</html>")


def _with_tensor_twice(folder: Path) -> None:
    tensors = [load_file(folder / shard) for shard in _SHARDS]
    tensors[1]["model.embed_tokens.weight"] = tensors[0]["model.embed_tokens.weight"] + 1
    save_file(tensors[1], folder / _SHARDS[1], metadata={"format": "pt"})


def _with_single_file(folder: Path) -> None:
    (folder / _SHARDS[0]).replace(folder / "model.safetensors")


#: Name -> change of a folder with three shards, and the file or tensor that the error names.
DAMAGED_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut": (_cut, _SHARDS[1]),
    "shard that is a page": (_replace_by_page, _SHARDS[1]),
    "shard missing": (lambda folder: (folder / _SHARDS[1]).unlink(), _SHARDS[1]),
    "index without its map": (lambda folder: (folder / _INDEX).write_text("{}"), _INDEX),
    "index cut": (lambda folder: (folder / _INDEX).write_text("{"), _INDEX),
    "tensor in two shards": (_with_tensor_twice, "model.embed_tokens.weight"),
    "shards and a single file": (_with_single_file, "model.safetensors"),
}

#: Name -> change of the tensors, and the tensor or setting that the error names.
DAMAGED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing layer": (_without(_LAYER), _LAYER),
    "missing head": (_without("lm_head.weight"), "lm_head.weight"),
    "missing norm": (_without("model.norm.weight"), "model.norm.weight"),
    "stray layer": (_with("model.layers.7.mlp.up_proj.weight", 3, 3), "model.layers.7.mlp"),
    "another shape": (_with("model.norm.weight", 7), "model.norm.weight"),
    "tied, another head": (_with_another_head, "tie_word_embeddings"),
    "NaN": (_with_nan, ""),
    "empty head": (_with_empty_head, ""),
    "integers": (_with_integers, _LAYER),
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
    if name == "sharded" or name in DAMAGED_FILES:
        (folder / "model.safetensors").unlink()
        Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
        if name in DAMAGED_FILES:
            DAMAGED_FILES[name][0](folder)
        return folder
    tensors = load_file(folder / "model.safetensors")
    (SOUND.get(name) or DAMAGED[name][0])(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
