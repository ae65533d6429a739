"""A sequence of a request -> a teacher's token ids, for whoever takes nothing but ids.

What a mopd service does with a request on its side, done on this one: prompt and completion are
tokenized apart, so that the seam between them is a byte boundary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby
from typing import Protocol

import numpy as np

from mopd_client.tokenizers.folder import FolderTokenizer
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, encode_prompt


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """A sequence in the teacher's tokens."""

    prompt_ids: list[int]  # at least one
    completion: TokenSequence

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt_ids, *self.completion.token_ids.tolist()]


def sequence_tokens(
    teacher: str, tokenizer: FolderTokenizer, sequence: SequenceRequest
) -> SequenceTokens:
    """The sequence in this tokenizer's ids.

    Raises:
        TeacherError: with the status of a mopd service's refusal, when it has no such ids, control
            tokens, roles or ending.
    """
    completion = completion_tokens(teacher, tokenizer, sequence)
    try:
        prompt_ids = _prompt_ids(tokenizer, sequence)
        tokenizer.table.require_known(np.array(prompt_ids, dtype=np.int64))
    except (DataError, UnicodeEncodeError) as error:
        raise _refusal(teacher, HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    except _Refused as refused:
        raise _refusal(teacher, refused.status, str(refused)) from refused
    if not prompt_ids:
        raise _refusal(
            teacher,
            HTTPStatus.BAD_REQUEST,
            "the prompt has no tokens, so nothing predicts the first completion token",
        )
    return SequenceTokens(prompt_ids, completion)


class CompletionTokenizer(Protocol):
    """A tokenizer in its form for completions, with its table."""

    @property
    def table(self) -> TokenTable:
        """The bytes, marks and roles of its tokens."""
        ...

    @property
    def encoder(self) -> TextEncoder:
        """Text in the middle of a sequence -> ids."""
        ...


def completion_tokens(
    teacher: str, tokenizer: CompletionTokenizer, sequence: SequenceRequest
) -> TokenSequence:
    """The completion of a sequence in this tokenizer's tokens, as the teacher will make it.

    Raises:
        TeacherError: as ``sequence_tokens``.
    """
    try:
        return tokenizer.table.sequence(_completion_ids(tokenizer, sequence))
    except (DataError, UnicodeEncodeError) as error:
        raise _refusal(teacher, HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    except _Refused as refused:
        raise _refusal(teacher, refused.status, str(refused)) from refused


def require_room(teacher: str, tokens: SequenceTokens, manifest: Manifest) -> None:
    """That a teacher can read all of a sequence.

    Raises:
        TeacherError: as a mopd service would answer, for what is too long.
    """
    length = len(tokens.token_ids)
    if length > manifest.max_model_len:
        raise _refusal(
            teacher,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"prompt and completion are {length} tokens, the limit is {manifest.max_model_len}",
        )


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _refusal(teacher: str, status: HTTPStatus, reason: str) -> TeacherError:
    return TeacherError(f"teacher {teacher!r} cannot be asked: {reason}", status=status)


def _prompt_ids(tokenizer: FolderTokenizer, sequence: SequenceRequest) -> list[int]:
    if sequence.prompt_token_ids is not None:
        return sequence.prompt_token_ids
    if sequence.messages is not None:
        if tokenizer.template is None:
            raise _Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "its tokenizer has no chat template, so it cannot take messages; "
                "expected prompt or prompt_token_ids",
            )
        messages = [message.model_dump() for message in sequence.messages]
        rendered = tokenizer.template.render(messages, add_generation_prompt=True)
        _require_unicode(rendered)
        # The template writes the special tokens itself.
        return tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
    assert sequence.prompt is not None
    _require_unicode(sequence.prompt)
    begin = [] if tokenizer.table.roles.bos is None else [tokenizer.table.roles.bos]
    return encode_prompt(tokenizer.tokenizer, sequence.prompt) or begin


def _completion_ids(tokenizer: CompletionTokenizer, sequence: SequenceRequest) -> list[int]:
    if sequence.completion_token_ids is not None:
        ids = sequence.completion_token_ids
    else:
        completion = sequence.completion
        assert completion is not None
        parts = [completion] if isinstance(completion, str) else completion
        ids = _encode(tokenizer, parts)
    return [*ids, _ending(tokenizer, ids)] if sequence.finished else ids


def _encode(tokenizer: CompletionTokenizer, parts: Sequence[str | ControlToken]) -> list[int]:
    """Neighbouring texts are one text: only control tokens are seams."""
    ids: list[int] = []
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(part for part in run if isinstance(part, str))
            _require_unicode(text)
            ids += tokenizer.encoder.encode(text)
        else:
            ids += [_control(tokenizer, part) for part in run if isinstance(part, ControlToken)]
    return ids


def _control(tokenizer: CompletionTokenizer, part: ControlToken) -> int:
    controls = tokenizer.table.controls
    if part.control not in controls:
        known = ", ".join(sorted(controls)[:16]) or "none"
        raise _Refused(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"it has no control token {part.control!r}; it has {known}",
        )
    return controls[part.control]


def _ending(tokenizer: CompletionTokenizer, ids: Sequence[int]) -> int:
    roles = tokenizer.table.roles
    if roles.end_of_turn is None:
        raise _Refused(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "it has no end-of-turn token to score; expected finished: false",
        )
    if ids and ids[-1] in roles.ending:
        raise _Refused(
            HTTPStatus.BAD_REQUEST,
            f"the completion already ends with ending token {ids[-1]} and finished: true would add "
            "another; expected a completion without its ending token",
        )
    return roles.end_of_turn


def _require_unicode(text: str) -> None:
    """JSON can spell half of a character (a lone surrogate), which has no bytes."""
    text.encode()
