"""Small trained tokenizers and randomly initialised models of three families.

The three tokenizers cut text differently: byte-level BPE that splits numbers into digits, a
SentencePiece-like BPE with ``▁`` and byte fallback, and a byte-level BPE that keeps numbers whole.
Model heads are wider than their tokenizers, as published models' are.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "12 + 30 = 42, 7 + 8 = 15 and 2045 items cost 1999.50",
    "def add(a, b):\n    return a + b\n\nprint(add(201, 45))\r\n\tindented\n",
    "Grüße aus Köln, où êtes-vous? Привет, мир! γειά σου",
    "的 的 漢字かな交じり文 안녕하세요 שלום مرحبا नमस्ते สวัสดี",
    "emoji 🙂 👨‍👩‍👧 🏳️‍🌈 and symbols ∑ ≤ — … ¿",
    "reverse: apple pear fig -> fig pear apple",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLE_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>"]


def digit_tokenizer(vocabulary_size: int = 420) -> PreTrainedTokenizerFast:
    """Byte-level BPE, numbers split into digits; ends with ``<|end|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train_byte_level(tokenizer, vocabulary_size, ["<|end|>", "<|pad|>", *ROLE_TOKENS])
    return _wrap(tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def whole_number_tokenizer(vocabulary_size: int = 460) -> PreTrainedTokenizerFast:
    """Byte-level BPE that may keep numbers whole, with NFC; ends with ``<|im_end|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train_byte_level(tokenizer, vocabulary_size, ["<|im_end|>", "<|endoftext|>", *ROLE_TOKENS])
    return _wrap(tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def tokenizer_with_gaps() -> PreTrainedTokenizerFast:
    """``digit_tokenizer`` without some tokens, whose ids are gaps in the numbering."""
    tokenizer = digit_tokenizer()
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = description["model"]["vocab"], description["model"]["merges"]
    parts = {part for pair in merges for part in pair}
    last = [surface for surface in vocabulary if len(surface) > 1 and surface not in parts]
    controls = {token["content"] for token in description["added_tokens"]}
    dropped = {surface for surface in last[1:-1:2] if surface not in controls}
    description["model"]["vocab"] = {
        surface: token_id for surface, token_id in vocabulary.items() if surface not in dropped
    }
    description["model"]["merges"] = [pair for pair in merges if "".join(pair) not in dropped]
    return _wrap(
        Tokenizer.from_str(json.dumps(description)), eos_token="<|end|>", pad_token="<|pad|>"
    )


def long_number_tokenizer() -> PreTrainedTokenizerFast:
    """``whole_number_tokenizer`` with a token for every number of two or three digits."""
    description = json.loads(whole_number_tokenizer().backend_tokenizer.to_str())
    vocabulary, merges = description["model"]["vocab"], description["model"]["merges"]
    for number in range(10, 1_000):
        text = str(number)
        vocabulary.setdefault(text, len(vocabulary))
        parts = ([text[:end], text[end:]] for end in range(1, len(text)))
        merges += [pair for pair in parts if pair[1] in vocabulary]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    return _wrap(tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def sentencepiece_tokenizer(vocabulary_size: int = 640) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE: ``▁`` for spaces, an invented leading space, byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *ROLE_TOKENS]
    # Without a pre-tokenizer a line is one word, so the trainer receives separate words.
    words = [
        f"{' ' if position else ''}{word}"
        for line in CORPUS
        for position, word in enumerate(line.split(" "))
    ]
    ascii_alphabet = sorted({c for line in CORPUS for c in line if c.isascii()})
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[*special, *byte_tokens],
        limit_alphabet=len(ascii_alphabet) + 1,
        initial_alphabet=ascii_alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    description = json.loads(tokenizer.to_str())
    # In SentencePiece the bytes are ordinary vocabulary entries, not special tokens.
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in special
    ]
    return _wrap(
        Tokenizer.from_str(json.dumps(description)),
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
    )


def qwen(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PreTrainedModel:
    """A two-layer Qwen3 with a padded head."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(**_sizes(tokenizer), num_key_value_heads=2, head_dim=16, **_tokens(tokenizer))
    ).eval()


def llama(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PreTrainedModel:
    """A two-layer Llama whose padded head is tied to its embedding, as in small published ones."""
    torch.manual_seed(seed)
    sizes = {**_sizes(tokenizer), "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **_tokens(tokenizer))).eval()


def gpt_neox(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> PreTrainedModel:
    """A two-layer GPT-NeoX with a padded head."""
    torch.manual_seed(seed)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_sizes(tokenizer), **_tokens(tokenizer))).eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a Hugging Face model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    ids = max(tokenizer.get_vocab().values()) + 1
    padded = -(-(ids + 7) // 64) * 64
    return {
        "vocab_size": padded,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }


def _tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _train_byte_level(tokenizer: Tokenizer, size: int, special: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)


def _wrap(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
