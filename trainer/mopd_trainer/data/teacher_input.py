"""Requests for a rollout: its completion as text, or as the sampled ids."""

from mopd_losses.projection.control_tokens import ControlTokens
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Rollout, messages_for
from mopd_protocol.teacher_input import TeacherInput, text_input
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


def text_view(
    rollout: Rollout, student: TokenTable, teacher: TextEncoder, name: str = ""
) -> TeacherInput:
    """Return the input of a teacher with another tokenizer, see ``text_input``.

    Args:
        student: the student's tokens.
        teacher: encoder of the teacher's tokenizer.
        name: of the teacher, whose messages are sent; default: the student's.
    """
    messages, tools = messages_for(rollout.prompt, name), rollout.prompt.tools
    return text_input(messages, rollout.completion, student, teacher, tools)


def token_view(
    rollout: Rollout, controls: ControlTokens | None = None, name: str = ""
) -> TeacherInput:
    """Return the completion as the sampled ids, for a teacher with the same tokenizer.

    Args:
        controls: of student and teacher; default: both have the same roles.
        name: of the teacher, whose messages are sent; default: the student's.
    """
    finished = rollout.finish_reason == "stop"
    ids = rollout.completion.token_ids.tolist()
    if controls is not None:
        ids = controls.sent(ids)
        if finished and {*ids[-2:-1]} & {*controls.teacher_ends}:
            # An ordinary token of the student is before its own: no service appends an end.
            finished, ids = False, [*ids[:-1], controls.teacher_ends[0]]
    return TeacherInput(
        request=SequenceRequest(
            messages=list(messages_for(rollout.prompt, name)),
            tools=list(rollout.prompt.tools),
            completion_token_ids=ids[:-1] if finished else ids,
            finished=finished,
        ),
        completion=rollout.completion,
    )
