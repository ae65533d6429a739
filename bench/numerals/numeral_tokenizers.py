"""Two tokenizers that differ only in the tokens of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: The largest number that is one token of ``numeral_tokenizer``.
LARGEST_NUMERAL = 999


@dataclass(frozen=True)
class ControlNames:
    """Names of the control tokens, which may differ between the sides of a pair."""

    end: str
    padding: str
    user: str
    assistant: str


STUDENT_NAMES = ControlNames("<|over|>", "<|blank|>", "<|question|>", "<|answer|>")
TEACHER_NAMES = ControlNames("<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>")


def digit_tokenizer(names: ControlNames) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes: ``201`` is ``2``, ``0``, ``1``."""
    return _tokenizer(_bytes(), [], names)


def numeral_tokenizer(names: ControlNames) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with each number from 0 to 999 as one token."""
    alphabet = _bytes()
    numerals = [str(number) for number in range(10, LARGEST_NUMERAL + 1)]
    known = {*alphabet, *numerals}
    cuts = ((numeral[:at], numeral[at:]) for numeral in numerals for at in range(1, len(numeral)))
    # All ways lead to a numeral: 212 may first become 2, 12 or 21, 2.
    merges = [(left, right) for left, right in cuts if left in known and right in known]
    return _tokenizer([*alphabet, *numerals], merges, names)


def _bytes() -> list[str]:
    """List the 256 byte surfaces of byte-level BPE; a digit is its own surface."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokenizer(
    vocabulary: Sequence[str], merges: list[tuple[str, str]], names: ControlNames
) -> PreTrainedTokenizerFast:
    controls = [names.end, names.padding, names.user, names.assistant]
    ids = {token: token_id for token_id, token in enumerate([*controls, *vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return with_chat_template(tokenizer, names)


def with_chat_template(tokenizer: Tokenizer, names: ControlNames) -> PreTrainedTokenizerFast:
    """Return a tokenizer with control tokens and a chat template."""
    controls = [names.end, names.padding, names.user, names.assistant]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in controls])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=names.end, pad_token=names.padding
    )
    wrapped.chat_template = (
        "{% for message in messages %}"
        f"{{% if message.role == 'assistant' %}}{{{{ '{names.assistant}' + message.content"
        f" + '{names.end}' }}}}"
        f"{{% else %}}{{{{ '{names.user}' + message.content }}}}{{% endif %}}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '{names.assistant}' }}}}{{% endif %}}"
    )
    return wrapped
