"""A small random model with a tokenizer trained on Python's standard library, and text for it."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LAYERS = 2
HIDDEN = 64
#: Tokens that merges produce; a larger vocabulary has unused ones.
LEARNT_TOKENS = 8192


def make_small_teacher(
    folder: Path, *, vocabulary: int, layers: int = LAYERS, hidden: int = HIDDEN
) -> None:
    """Save a Qwen3 with random weights and a byte-level BPE trained on Python sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, LEARNT_TOKENS),
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    tokenizer = _with_unused_tokens(tokenizer, vocabulary)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _with_unused_tokens(tokenizer: Tokenizer, vocabulary: int) -> Tokenizer:
    """Extend the vocabulary by tokens that no text has: only the number of ids matters."""
    document = json.loads(tokenizer.to_str())
    vocab = document["model"]["vocab"]
    for number in range(len(vocab), vocabulary):
        vocab[f"<unused-{number}>"] = number
    return Tokenizer.from_str(json.dumps(document))


def token_sequences(folder: Path, *, count: int, tokens: int) -> list[list[int]]:
    """Return ``count`` sequences of ``tokens`` ids each, from the tokenizer's training text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sequences: list[list[int]] = []
    for text in _sources():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        sequences.extend(ids[at : at + tokens] for at in range(0, len(ids) - tokens, tokens))
        if len(sequences) >= count:
            return sequences[:count]
    raise RuntimeError(
        f"Python's sources contain only {len(sequences)} stretches of {tokens} tokens"
    )


def _sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
