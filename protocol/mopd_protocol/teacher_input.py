"""``TeacherInput``: a completion as text and control tokens, or as token ids, for one teacher.

A teacher with another tokenizer receives text. Parts that cannot be sent are replaced, also in the
student's tokens for alignment, and counted: a control token that the teacher does not have becomes
its literal text. Bytes that are not UTF-8 cannot be sent as text, so a completion with such bytes
becomes the ids of the teacher's tokens. If none of them spells one of these bytes, the text ends
before the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mopd_protocol.messages import Message, Tool
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence, valid_utf8
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


@dataclass(frozen=True, eq=False)
class TeacherInput:
    """A teacher's request, and the student's tokens to align with the scores."""

    request: SequenceRequest
    completion: TokenSequence  # control tokens sent as text have bytes
    control_tokens_as_text: int = 0
    invalid_utf8_bytes: int = 0  # not sent: from the first byte that is not UTF-8

    @property
    def sent_tokens(self) -> int:
        """Number of the student's tokens, from the first one on, whose text is sent completely."""
        if not self.invalid_utf8_bytes:
            return len(self.completion)
        sent = len(self.completion.text) - self.invalid_utf8_bytes
        return int(np.searchsorted(self.completion.byte_ends, sent, side="right"))


def text_input(
    messages: Sequence[Message],
    completion: TokenSequence,
    student: TokenTable,
    teacher: TextEncoder,
    tools: Sequence[Tool] = (),
) -> TeacherInput:
    """Return the completion as text, with control tokens that the teacher has by name; as ids of
    the teacher's tokens if it is not UTF-8.

    Args:
        messages: of the prompt.
        completion: in the student's tokens.
        student: the student's tokens.
        teacher: encoder of the teacher's tokenizer.
        tools: of the prompt.
    """
    names = {token_id: name for name, token_id in student.controls.items()}
    literal: dict[int, str] = {}  # token position -> text
    controls: dict[int, str] = {}
    for position, mark in completion.marks.items():
        if mark != END_OF_TURN:
            name = names[int(completion.token_ids[position])]
            (controls if _is_sent(name, teacher.table) else literal)[position] = name
    finished = completion.ends_turn
    completion = _with_literals(completion, literal)
    pieces = _pieces(completion, controls)
    valid = _valid_beginning(pieces)
    fields: dict[str, Any] = {"completion": _parts(valid)}
    invalid_bytes = len(completion.text) - sum(len(p) for p in valid if isinstance(p, bytes))
    if invalid_bytes:
        ids = _teacher_ids(pieces, teacher)
        if ids is not None:
            fields, invalid_bytes = {"completion_token_ids": ids}, 0
    return TeacherInput(
        request=SequenceRequest(
            messages=list(messages),
            tools=list(tools),
            finished=finished and not invalid_bytes,
            **fields,
        ),
        completion=completion,
        control_tokens_as_text=len(literal),
        invalid_utf8_bytes=invalid_bytes,
    )


def _is_sent(name: str, teacher: TokenTable) -> bool:
    """Return True if the teacher has this control token, and it does not end a completion."""
    return name in teacher.controls and teacher.controls[name] not in teacher.roles.ending


def _with_literals(completion: TokenSequence, literal: Mapping[int, str]) -> TokenSequence:
    """Replace control tokens by their literal text."""
    if not literal:
        return completion
    ends = completion.byte_ends.tolist()
    starts = [0, *ends[:-1]]
    pieces = [completion.text[start:end] for start, end in zip(starts, ends, strict=True)]
    for position, name in literal.items():
        pieces[position] = name.encode()
    return TokenSequence(
        token_ids=completion.token_ids,
        byte_ends=np.cumsum([len(piece) for piece in pieces]).astype(np.int32),
        text=b"".join(pieces),
        marks={p: mark for p, mark in completion.marks.items() if p not in literal},
    )


def _pieces(completion: TokenSequence, controls: Mapping[int, str]) -> list[bytes | ControlToken]:
    """Divide a completion into its text and the control tokens to send."""
    pieces: list[bytes | ControlToken] = []
    start = 0
    for position, name in controls.items():
        end = int(completion.byte_ends[position])
        pieces += [completion.text[start:end], ControlToken(control=name)]
        start = end
    return [*pieces, completion.text[start:]]


def _valid_beginning(pieces: Sequence[bytes | ControlToken]) -> list[bytes | ControlToken]:
    """Return what is before the first byte that is not UTF-8."""
    valid: list[bytes | ControlToken] = []
    for piece in pieces:
        if isinstance(piece, ControlToken):
            valid.append(piece)
            continue
        valid.append(valid_utf8(piece))
        if valid[-1] != piece:
            break
    return valid


def _teacher_ids(pieces: Sequence[bytes | ControlToken], teacher: TextEncoder) -> list[int] | None:
    """Return a teacher's ids of text, invalid bytes and control tokens; None if it lacks a byte."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, ControlToken):
            ids.append(teacher.table.controls[piece.control])
            continue
        encoded = teacher.encode_bytes(piece)
        if encoded is None:
            return None
        ids += encoded
    return ids


def _parts(pieces: Sequence[bytes | ControlToken]) -> str | list[str | ControlToken]:
    """Return a request's ``completion``: text, or parts if there are control tokens."""
    parts = [piece.decode() if isinstance(piece, bytes) else piece for piece in pieces]
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [part for part in parts if part != ""]
