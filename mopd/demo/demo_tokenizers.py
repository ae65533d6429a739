"""Three tokenizers that agree on most words and differ elsewhere, one per model of the demo."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mopd.demo.corpus import demo_corpus

#: The student's vocabulary has every word as one token, with and without a leading space.
SUMS_TEACHER_SIZE = 400
WORDS_TEACHER_SIZE = 680
STUDENT_SIZE = 900
#: Words that the words teacher splits in two. Each first piece is unique: words with a common first
#: piece could not be distinguished by a distribution over first pieces.
WORDS_TEACHER_PIECES = {
    "bridge": ("bri", "dge"),
    "koala": ("ko", "ala"),
    "pencil": ("pen", "cil"),
    "quail": ("qu", "ail"),
    "strawberry": ("straw", "berry"),
    "umbrella": ("umb", "rella"),
}

_SUMS_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}{% endfor %}"
)
_STUDENT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|answer|>' + message.content + '<|over|>' }}"
    "{% else %}{{ '<|question|>' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}"
)


def sums_teacher_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with single digits and ChatML; turns end with ``<|im_end|>``."""
    tokenizer = _byte_level(
        demo_corpus(seed=1), SUMS_TEACHER_SIZE, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    return _wrap(tokenizer, _SUMS_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def words_teacher_tokenizer() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like BPE with a leading space; turns end with ``</s>``."""
    tokenizer = _sentencepiece_like(
        demo_corpus(seed=2),
        WORDS_TEACHER_SIZE,
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    )
    return _wrap(
        tokenizer,
        _WORDS_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
    )


def student_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with single digits; turns end with ``<|over|>``."""
    tokenizer = _byte_level(
        demo_corpus(seed=3), STUDENT_SIZE, ["<|over|>", "<|blank|>", "<|question|>", "<|answer|>"]
    )
    return _wrap(tokenizer, _STUDENT_TEMPLATE, eos_token="<|over|>", pad_token="<|blank|>")


def _byte_level(corpus: list[str], size: int, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _sentencepiece_like(corpus: list[str], size: int, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=special[0], fuse_unk=True))
    # Pieces are separate training lines: no pre-tokenizer splits words, and no merge may cross a
    # space.
    pieces = [
        f"{'▁' if position and not within else ''}{piece}"
        for line in corpus
        for position, word in enumerate(line.split(" "))
        for within, piece in enumerate(WORDS_TEACHER_PIECES.get(word, (word,)))
    ]
    bytes_of_fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*special, *bytes_of_fallback],
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
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
    description = json.loads(tokenizer.to_str())
    # SentencePiece bytes are ordinary vocabulary entries, not special tokens.
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in special
    ]
    return Tokenizer.from_str(json.dumps(description))


def _wrap(tokenizer: Tokenizer, chat_template: str, **names: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = chat_template
    return wrapped
