"""Teacher and students: a copy in float32, a pruned copy, a copy with another vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from mopd_protocol import TextEncoder, TokenTable, replacing_folder


def save_teacher(model: str, gguf_file: str | None, folder: Path) -> Path:
    """Save a copy of a model in float32, of a GGUF file if one is named; return the folder."""
    if folder.is_dir():
        return folder
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer: Any = AutoTokenizer.from_pretrained(model, **options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # a dequantized model cannot be saved with it
    plain: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    plain.load_state_dict(loaded.state_dict())
    with replacing_folder(folder) as unfinished:
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def save_pruned(teacher: Path, removed: Sequence[int], folder: Path) -> Path:
    """Save a copy of a model without some of its layers (from 0); return the folder."""
    if folder.is_dir():
        return folder
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    kept = [n for n in range(len(model.base_model.layers)) if n not in removed]
    model.base_model.layers = torch.nn.ModuleList(model.base_model.layers[n] for n in kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[n] for n in kept]
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(teacher).save_pretrained(unfinished)
    return folder


def save_with_tokenizer(model: Path, tokenizer_file: Path, folder: Path) -> Path:
    """Save a copy of a model for another tokenizer; return the folder.

    The embedding of a token is the mean of those with which the model's tokenizer spells its text.
    Control tokens and the chat template are the model's.
    """
    if folder.is_dir():
        return folder
    own: Any = AutoTokenizer.from_pretrained(model)
    controls = [str(token) for token in own.added_tokens_decoder.values() if token.special]
    names = {name: getattr(own, name) for name in ("bos_token", "eos_token", "pad_token")}
    other = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), extra_special_tokens=controls, **names
    )
    other.chat_template = own.chat_template
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def ends() -> list[Any]:
        return [loaded.get_input_embeddings(), loaded.get_output_embeddings()]

    means = [_mean_rows(end.weight.detach(), own, other) for end in ends()]
    loaded.resize_token_embeddings(len(other), mean_resizing=False)
    with torch.no_grad():
        for end, mean in zip(ends(), means, strict=True):
            end.weight.copy_(mean)
    with replacing_folder(folder) as unfinished:
        loaded.save_pretrained(unfinished)
        other.save_pretrained(unfinished)
    return folder


def _mean_rows(rows: Tensor, own: Any, other: Any) -> Tensor:
    """Return a row for each token of another tokenizer.

    Args:
        rows: [own vocabulary, width].
    """
    tables = [TokenTable.from_tokenizer(each.backend_tokenizer) for each in (own, other)]
    encoder = TextEncoder(own.backend_tokenizer, tables[0])
    single = {token: number for number, token in enumerate(tables[0].all_bytes) if len(token) == 1}
    result = rows.mean(dim=0).repeat(len(other), 1)  # of what the model's tokenizer cannot spell
    for token, spelled in enumerate(tables[1].all_bytes):
        if token in tables[1].marks:
            ids = [tables[0].controls.get(tables[1].marks[token])]
        else:
            try:
                ids = encoder.encode(spelled.decode())
            except UnicodeDecodeError:  # a part of a character
                ids = [single.get(bytes([byte])) for byte in spelled]
        known = [each for each in ids if each is not None]
        if known:
            result[token] = rows[known].mean(dim=0)
    return result


def middle_layers(layers: int, count: int) -> list[int]:
    """Return ``count`` layers, every third one around the middle."""
    first = layers // 2 - 3 * (count - 1) // 2
    return [first + 3 * n for n in range(count)]
