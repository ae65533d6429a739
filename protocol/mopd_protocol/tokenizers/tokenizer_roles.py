"""Finds which tokens begin, end and pad: of a tokenizer, its chat template and a model's settings.

The end of a turn is derived from the template: the control token after an assistant's message is
the token that a model of this family emits to stop. The generation settings of a model may name
more tokens that end a completion (Llama 3, Gemma, Qwen).
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from mopd_protocol.tokenizers.token_table import TokenRoles

_SENTINEL = "mopd-sentinel"


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this file needs."""

    chat_template: Any
    bos_token_id: Any
    eos_token_id: Any
    pad_token_id: Any

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = ...) -> Any:
        """The conversation as text."""
        ...


def roles_of(
    tokenizer: ChatTokenizer, controls: Mapping[str, int], ends: Collection[int] = ()
) -> TokenRoles:
    """The roles of a tokenizer whose control tokens are ``controls`` (literal text -> id).

    Without a chat template the end of a turn is the end of text.

    Args:
        ends: see ``published_ends``; ids that are no control token, or the beginning of text, are
            those of another tokenizer and are ignored.
    """
    end_of_turn = _end_of_turn(tokenizer, controls)
    roles = TokenRoles(
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        end_of_turn=tokenizer.eos_token_id if end_of_turn is None else end_of_turn,
        pad=tokenizer.pad_token_id,
    )
    possible = {*controls.values()} - {roles.bos, *roles.ending}
    others = tuple(sorted(possible.intersection(ends)))
    return roles.model_copy(update={"other_ends": others})


def _end_of_turn(tokenizer: ChatTokenizer, controls: Mapping[str, int]) -> int | None:
    if not tokenizer.chat_template:
        return None
    conversation = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _SENTINEL},
    ]
    rendered: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    after = rendered.rpartition(_SENTINEL)[2].lstrip()
    longest_first = sorted(controls, key=len, reverse=True)
    return next((controls[name] for name in longest_first if after.startswith(name)), None)
