"""Convert the sequences of a request to a teacher's token ids, as a mopd service does.

For teachers that accept token ids only. Prompt and completion are tokenized separately, so that
the boundary between them is a byte boundary.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby

import numpy as np

from mopd_client.tokenizers.pretrained import PretrainedTokenizer
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import encode_prompt


@dataclass(frozen=True, eq=False)
class SequenceTokens:
    """A sequence in the teacher's tokens."""

    prompt_ids: list[int]  # not empty
    completion: TokenSequence

    @property
    def token_ids(self) -> list[int]:
        """Ids of prompt and completion."""
        return [*self.prompt_ids, *self.completion.token_ids.tolist()]


def sequence_tokens(
    teacher: str, tokenizer: PretrainedTokenizer, sequence: SequenceRequest
) -> SequenceTokens:
    """Tokenize prompt and completion.

    Raises:
        TeacherError: with the status of a mopd service, on unknown ids, control tokens, roles or a
            missing end-of-turn token.
    """
    completion = completion_tokens(teacher, tokenizer, sequence)
    with _teacher_errors(teacher):
        prompt_ids = _prompt_ids(tokenizer, sequence)
        tokenizer.table.require_known(np.array(prompt_ids, dtype=np.int64))
        if not prompt_ids:
            raise _Rejection(
                HTTPStatus.BAD_REQUEST,
                "prompt has no tokens (the first completion token needs a preceding token)",
                key="prompt",
            )
    return SequenceTokens(prompt_ids, completion)


def completion_tokens(
    teacher: str, tokenizer: TeacherTokenizer, sequence: SequenceRequest
) -> TokenSequence:
    """Tokenize the completion.

    Raises:
        TeacherError: as ``sequence_tokens``.
    """
    with _teacher_errors(teacher):
        return tokenizer.table.sequence(_completion_ids(tokenizer, sequence))


def require_length(teacher: str, tokens: SequenceTokens, manifest: Manifest) -> None:
    """Check the length of a sequence against the teacher's limit.

    Raises:
        TeacherError: with status 413, if the sequence is too long.
    """
    length = len(tokens.token_ids)
    if length > manifest.max_model_len:
        raise TeacherError(
            f"teacher {teacher!r} rejects the sequence: prompt and completion are too long (found "
            f"{length} tokens, expected at most {manifest.max_model_len})",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            key="max_model_len",
        )


class _Rejection(DataError):
    def __init__(self, status: HTTPStatus, message: str, *, key: str) -> None:
        super().__init__(message, key=key)
        self.status = status


@contextmanager
def _teacher_errors(teacher: str) -> Generator[None]:
    """Convert errors to a TeacherError with the status of a mopd service."""
    try:
        yield
    except (DataError, UnicodeEncodeError) as error:
        unprocessable = HTTPStatus.UNPROCESSABLE_ENTITY
        raise TeacherError(
            f"teacher {teacher!r} rejects the sequence: {error}",
            status=error.status if isinstance(error, _Rejection) else unprocessable,
            key=error.key if isinstance(error, DataError) else None,
        ) from error


def _prompt_ids(tokenizer: PretrainedTokenizer, sequence: SequenceRequest) -> list[int]:
    if sequence.prompt_token_ids is not None:
        return sequence.prompt_token_ids
    if sequence.messages is not None:
        rendered = tokenizer.render([message.model_dump() for message in sequence.messages])
        _require_unicode(rendered)
        # The template contains the special tokens.
        return tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
    assert sequence.prompt is not None
    _require_unicode(sequence.prompt)
    bos = tokenizer.table.roles.bos
    return encode_prompt(tokenizer.tokenizer, sequence.prompt) or ([] if bos is None else [bos])


def _completion_ids(tokenizer: TeacherTokenizer, sequence: SequenceRequest) -> list[int]:
    if sequence.completion_token_ids is not None:
        ids = sequence.completion_token_ids
    else:
        completion = sequence.completion
        assert completion is not None
        parts = [completion] if isinstance(completion, str) else completion
        ids = _encode(tokenizer, parts)
    return [*ids, _end_of_turn(tokenizer, ids)] if sequence.finished else ids


def _encode(tokenizer: TeacherTokenizer, parts: Sequence[str | ControlToken]) -> list[int]:
    """Encode a completion; adjacent texts are joined, so that only control tokens split them."""
    ids: list[int] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            text = "".join(part for part in group if isinstance(part, str))
            _require_unicode(text)
            ids += tokenizer.encoder.encode(text)
        else:
            ids += [_control(tokenizer, part) for part in group if isinstance(part, ControlToken)]
    return ids


def _control(tokenizer: TeacherTokenizer, part: ControlToken) -> int:
    controls = tokenizer.table.controls
    if part.control not in controls:
        known = ", ".join(sorted(controls)[:16]) or "none"
        raise DataError(
            f"control token {part.control!r} not found in the tokenizer (expected one of {known})",
            key="control",
        )
    return controls[part.control]


def _end_of_turn(tokenizer: TeacherTokenizer, ids: Sequence[int]) -> int:
    roles = tokenizer.table.roles
    if roles.end_of_turn is None:
        raise DataError(
            "end-of-turn token not found in the tokenizer. Use finished: false", key="finished"
        )
    if ids and ids[-1] in roles.ending:
        raise _Rejection(
            HTTPStatus.BAD_REQUEST,
            f"completion already ends with ending token {ids[-1]}, and finished: true adds another "
            "(expected a completion without its ending token)",
            key="finished",
        )
    return roles.end_of_turn


def _require_unicode(text: str) -> None:
    """Raise UnicodeEncodeError on a lone surrogate, which JSON allows and UTF-8 does not."""
    text.encode()
