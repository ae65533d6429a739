"""Teacher and students: a copy in float32, a pruned copy, a copy with another vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mopd_protocol import replacing_folder


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


def middle_layers(layers: int, count: int) -> list[int]:
    """Return ``count`` layers, every third one around the middle."""
    first = layers // 2 - 3 * (count - 1) // 2
    return [first + 3 * n for n in range(count)]
