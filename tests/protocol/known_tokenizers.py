"""Tokenizers of each kind that the protocol reads, made once; copies for tests that change them."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import tiny_models

NAMES = ["digit", "whole_number", "sentencepiece", "unigram"]
BYTE_LEVEL = {"digit", "whole_number"}


@cache
def description(name: str) -> str:
    """The ``tokenizer.json`` of one of ``NAMES``."""
    makers = {
        "digit": lambda: tiny_models.digit_tokenizer().backend_tokenizer,
        "whole_number": lambda: tiny_models.whole_number_tokenizer().backend_tokenizer,
        "sentencepiece": lambda: tiny_models.sentencepiece_tokenizer().backend_tokenizer,
        "unigram": _unigram,
    }
    return makers[name]().to_str()


def tokenizer(name: str) -> Tokenizer:
    """A copy that the test may change."""
    return Tokenizer.from_str(description(name))


def with_thinking_marks(name: str) -> Tokenizer:
    """As published chat models have it: special tokens beyond the vocabulary, then others."""
    extended = tokenizer(name)
    extended.add_special_tokens(["<|first|>", "<|second|>"])
    extended.add_tokens([AddedToken("<think>", special=False), AddedToken("    ", special=False)])
    return extended


def _unigram() -> Tokenizer:
    """A vocabulary of pieces with scores, control tokens among them, and byte fallback."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz<>/|0123456789", "▁the", "ing", "▁a", "12"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -30.0) for byte in range(256)]
    vocabulary += [(piece, -4.0 - position / 10) for position, piece in enumerate(pieces)]
    unigram = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    unigram.add_special_tokens(["<unk>", "<s>", "</s>"])
    return unigram
