"""The three tiny tokenizers as the losses see them, and tokenizers made of chosen tokens."""

from dataclasses import dataclass
from functools import cache
from itertools import product

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mopd_protocol.tokenizers.token_table import (
    TextEncoder,
    TokenRoles,
    TokenTable,
    byte_level_alphabet,
    control_tokens,
)
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of
from tests import tiny_models

NAMES = ("digit", "whole_number", "sentencepiece")
PAIRS = list(product(NAMES, NAMES))


@dataclass(frozen=True, eq=False)
class Family:
    """One tokenizer, and the width of a head with padding rows."""

    tokenizer: Tokenizer
    table: TokenTable
    encoder: TextEncoder
    logit_width: int


@cache
def family(name: str) -> Family:
    """One of ``NAMES``."""
    wrapped = getattr(tiny_models, f"{name}_tokenizer")()
    tokenizer = wrapped.backend_tokenizer
    return family_of(tokenizer, roles_of(wrapped, control_tokens(tokenizer_json(tokenizer))))


def family_of(tokenizer: Tokenizer, roles: TokenRoles, padding: int = 7) -> Family:
    """A tokenizer with a head of ``padding`` more rows."""
    table = TokenTable.from_tokenizer(tokenizer, roles)
    return Family(tokenizer, table, TextEncoder(tokenizer, table), table.size + padding)


def made_of(*spellings: str, end: str | None = None, without_merges: bool = False) -> Family:
    """Byte-level BPE of the 256 bytes and ``spellings``, with the merges that produce them.

    Args:
        without_merges: add the spellings to the vocabulary only; BPE never produces them.
    """
    letters = {byte: character for character, byte in byte_level_alphabet().items()}
    surfaces = [letters[byte] for byte in range(256)]
    merges: list[tuple[str, str]] = []
    for spelling in spellings:
        characters = [letters[byte] for byte in spelling.encode()]
        whole = characters[0]
        if without_merges:
            surfaces.append("".join(characters))
            continue
        for character in characters[1:]:
            if whole + character not in surfaces:
                merges.append((whole, character))
                surfaces.append(whole + character)
            whole += character
    vocabulary = {surface: token_id for token_id, surface in enumerate(surfaces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end is None:
        return family_of(tokenizer, TokenRoles())
    tokenizer.add_special_tokens([end])
    end_id = tokenizer.token_to_id(end)
    return family_of(tokenizer, TokenRoles(eos=end_id, end_of_turn=end_id))
