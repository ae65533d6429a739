"""Tiny tokenizers of ten published families, each with its steps, special tokens and class name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.tiny_models import CHAT_TEMPLATE, CORPUS

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

#: Texts on which the families differ: numbers, spaces, accents, control tokens, other scripts.
TEXTS = (
    "2033 + 1961 = 3994.5",
    " leading and  double   spaces\n\n\tdone ",
    "nai\u0308ve I'LL we'll don't",
    "ＡＢＣ ﬁ 漢字かな 안녕 🙂👨‍👩‍👧",
    "<|im_end|></s><s> <eos>text<|endoftext|> <|end|>",
)


@dataclass(frozen=True)
class Family:
    """A published tokenizer: model type, class, steps and special tokens."""

    model_type: str
    class_name: str
    tokenizer: Callable[[], Tokenizer]
    names: dict[str, str]


def _byte_level(
    controls: list[str], *splitters: Any, normalizer: Any = None, use_regex: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, last]) if splitters else last
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    description = json.loads(tokenizer.to_str())
    # As published, and as the classes of transformers build it; trainers leave null.
    description["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens(controls)
    return tokenizer


def _metaspace(controls: list[str]) -> Tokenizer:
    """Train a BPE with ``▁`` and byte fallback; its normalizer and pre-tokenizer are to be set."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    words = [f"▁{word}" for line in _TEXTS for word in line.split(" ")]
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[*controls, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = description["added_tokens"][: len(controls)]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    _add_bos(tokenizer, next(each for each in controls if each in ("<s>", "<bos>")))
    return tokenizer


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    ids = [(bos, tokenizer.token_to_id(bos))]
    begin = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", ids)
    steps = [each for each in (tokenizer.post_processor, begin) if each is not None]
    tokenizer.post_processor = processors.Sequence(steps) if len(steps) > 1 else begin


def _llama2() -> Tokenizer:
    tokenizer = _metaspace(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _spaces(strip=True)
    return tokenizer


def _mistral() -> Tokenizer:
    tokenizer = _metaspace(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = _spaces(strip=True)
    return tokenizer


def _gemma() -> Tokenizer:
    controls = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = _metaspace(controls)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _spaces(strip=False)
    return tokenizer


def _spaces(strip: bool) -> decoders.Decoder:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _llama3() -> Tokenizer:
    controls = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = _byte_level(controls, pre_tokenizers.Split(Regex(_LLAMA3), "isolated"))
    description = json.loads(tokenizer.to_str())
    description["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(description))
    _add_bos(tokenizer, "<|begin_of_text|>")
    return tokenizer


def _qwen2() -> Tokenizer:
    return _byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        pre_tokenizers.Split(Regex(_QWEN), "isolated"),
        normalizer=normalizers.NFC(),
    )


def _qwen3() -> Tokenizer:
    tokenizer = _qwen2()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer


def _phi() -> Tokenizer:
    tokenizer = _byte_level(["<|endoftext|>"], use_regex=True)
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in (4, 3, 2)])
    return tokenizer


def _gpt2() -> Tokenizer:
    return _byte_level(["<|endoftext|>"], use_regex=True)


def _gpt_neox() -> Tokenizer:
    return _byte_level(
        ["<|endoftext|>", "<|padding|>"], normalizer=normalizers.NFC(), use_regex=True
    )


def _smollm() -> Tokenizer:
    return _byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        pre_tokenizers.Digits(individual_digits=True),
        use_regex=True,
    )


_TEXTS = [
    *CORPUS,
    "2033 1961 203 196 20 19 3994",
    "I'LL we'll don't spaces  double   text done",
] * 3

_TEXT_END = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_SENTENCE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CHAT = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_LLAMA3_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
_GEMMA_NAMES = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}

FAMILIES = {
    "llama2": Family("llama", "LlamaTokenizer", _llama2, _SENTENCE),
    "llama3": Family("llama", "PreTrainedTokenizerFast", _llama3, _LLAMA3_NAMES),
    "mistral": Family("mistral", "LlamaTokenizer", _mistral, _SENTENCE),
    "qwen2": Family("qwen2", "Qwen2Tokenizer", _qwen2, _CHAT),
    "qwen3": Family("qwen3", "Qwen2Tokenizer", _qwen3, _CHAT),
    "gemma": Family("gemma2", "GemmaTokenizer", _gemma, _GEMMA_NAMES),
    "phi": Family("phi", "CodeGenTokenizer", _phi, _TEXT_END),
    "gpt2": Family("gpt2", "GPT2Tokenizer", _gpt2, _TEXT_END),
    "gpt_neox": Family("gpt_neox", "GPTNeoXTokenizer", _gpt_neox, _TEXT_END),
    "smollm": Family("llama", "GPT2Tokenizer", _smollm, {**_CHAT, "bos_token": "<|im_start|>"}),
}


@cache
def file_of(family: str) -> str:
    """Return the ``tokenizer.json`` of a family."""
    return FAMILIES[family].tokenizer().to_str()


def save_tokenizer(family: str, folder: Path, class_name: str | None) -> Tokenizer:
    """Publish the tokenizer of a family under a class name (None: without); return the file's."""
    names = FAMILIES[family].names
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(file_of(family))
    settings = {"model_max_length": 256, **names}
    if class_name is not None:
        settings["tokenizer_class"] = class_name
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    return Tokenizer.from_str(file_of(family))


def model_of(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a two-layer model of a family with a padded head for a tokenizer."""
    config = AutoConfig.for_model(
        FAMILIES[family].model_type,
        vocab_size=len(tokenizer) + 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # unlikely: transformers samples ids without a token, mopd does not
        model.get_output_embeddings().weight[len(tokenizer) :] = 0.0
    return model
