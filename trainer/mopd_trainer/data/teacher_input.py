"""A completion as one teacher can read it: as text and control tokens, or as token ids.

A teacher with another tokenizer is sent text. What cannot be sent as the student wrote it is
turned into what can be, on the student's side of the comparison too, and counted: a control token
that the teacher does not have becomes its literal text, and bytes that are not text end it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Rollout
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable


@dataclass(frozen=True, eq=False)
class TeacherInput:
    """What a teacher is asked, and the student's tokens as the answer can be compared with."""

    request: SequenceRequest
    completion: TokenSequence  # the student's tokens; control tokens sent as text have bytes here
    control_tokens_as_text: int = 0  # control tokens that were sent as text
    invalid_utf8_bytes: int = 0  # after the first byte that is not UTF-8


def text_view(rollout: Rollout, student: TokenTable, teacher: TokenTable) -> TeacherInput:
    """The completion as text, with control tokens by name where the teacher has them."""
    names = {token_id: name for name, token_id in student.controls.items()}
    literal: dict[int, str] = {}  # token position -> text
    controls: dict[int, str] = {}
    for position, mark in rollout.completion.marks.items():
        if mark != END_OF_TURN:
            name = names[int(rollout.completion.token_ids[position])]
            (controls if _reads_on_after(name, teacher) else literal)[position] = name
    completion = _with_literals(rollout.completion, literal)
    sendable = _valid_utf8_bytes(completion, controls)
    unsent = len(completion.text) - sendable
    return TeacherInput(
        request=SequenceRequest(
            messages=list(rollout.prompt.messages),
            completion=_parts(completion, controls, sendable),
            finished=rollout.finish_reason == "stop" and not unsent,
        ),
        completion=completion,
        control_tokens_as_text=len(literal),
        invalid_utf8_bytes=unsent,
    )


def token_view(rollout: Rollout) -> TeacherInput:
    """The completion as the very ids that were sampled, for a teacher with the same tokenizer."""
    finished = rollout.finish_reason == "stop"
    ids = rollout.completion.token_ids.tolist()
    return TeacherInput(
        request=SequenceRequest(
            messages=list(rollout.prompt.messages),
            completion_token_ids=ids[:-1] if finished else ids,
            finished=finished,
        ),
        completion=rollout.completion,
    )


def _reads_on_after(name: str, teacher: TokenTable) -> bool:
    """Whether the teacher has this control token and would not end its answer with it."""
    return name in teacher.controls and teacher.controls[name] not in teacher.roles.ending


def _with_literals(completion: TokenSequence, literal: Mapping[int, str]) -> TokenSequence:
    """The sequence with some control tokens spelling their names."""
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


def _valid_utf8_bytes(completion: TokenSequence, controls: Mapping[int, str]) -> int:
    """How many leading bytes are text, also between the control tokens that are sent."""
    start = 0
    for end in [*(int(completion.byte_ends[position]) for position in controls), None]:
        try:
            completion.text[start:end].decode()
        except UnicodeDecodeError as error:
            return start + error.start
        start = end or start
    return len(completion.text)


def _parts(
    completion: TokenSequence, controls: Mapping[int, str], sendable: int
) -> str | list[str | ControlToken]:
    text = completion.text[:sendable]
    if not controls:
        return text.decode()
    parts: list[str | ControlToken] = []
    sent = 0
    for position, name in controls.items():
        at = int(completion.byte_ends[position])
        if at > sendable:
            break
        parts += [text[sent:at].decode(), ControlToken(control=name)]
        sent = at
    parts.append(text[sent:].decode())
    return [part for part in parts if part != ""]
