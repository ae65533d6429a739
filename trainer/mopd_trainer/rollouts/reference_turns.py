"""Reference messages as completions: what the student's chat template makes of a turn."""

import re

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.student.identity import StudentIdentity


def reply_token_ids(prompt: Prompt, student: StudentIdentity) -> list[int]:
    """Return the ids of a prompt's reference message, up to the token that ends the turn.

    They are those of the conversation with the message, rendered by the student's template, behind
    the conversation before it with the generation prompt. Control tokens that the template spells
    are control tokens; all other text is a continuation of the prompt.

    Raises:
        DataError: if the template changes what is before the message, does not show a part of it,
            or shows text behind its end.
    """
    assert prompt.reply is not None  # checked by the caller
    before = student.render(prompt.messages, prompt.tools)
    messages = [*prompt.messages, prompt.reply]
    whole = student.render(messages, prompt.tools, add_generation_prompt=False)
    if not whole.startswith(before):
        pairs = enumerate(zip(before, whole, strict=False))
        start = next((n for n, (a, b) in pairs if a != b), min(len(before), len(whole)))
        place = len(before[:start].encode())
        raise _rejected(
            prompt,
            f"the student's template does not continue the prompt with it (byte {place} of the "
            f"prompt is {_excerpt(before, place)}, and with the message {_excerpt(whole, place)})",
        )
    text = whole[len(before) :]
    calls = [call.function.name for call in prompt.reply.tool_calls or ()]
    for part in (prompt.reply.thinking or "", prompt.reply.content, *calls):
        if part.strip() not in text:
            raise _rejected(prompt, f"the student's template does not show {part[:40]!r} of it")
    return _token_ids(prompt, text, student)


def _token_ids(prompt: Prompt, text: str, student: StudentIdentity) -> list[int]:
    controls = student.table.controls
    names = "|".join(map(re.escape, sorted(controls, key=len, reverse=True)))
    ids: list[int] = []
    pieces = re.split(f"({names})", text)
    for index, piece in enumerate(pieces):
        if piece not in controls:
            ids += student.encoder.encode(piece)
            continue
        ids.append(controls[piece])
        if ids[-1] in student.table.roles.ending:
            rest = "".join(pieces[index + 1 :])
            if rest.strip():
                raise _rejected(prompt, f"text is behind the token that ends it ({rest[:40]!r})")
            return ids
    return [*ids, student.table.roles.ending[0]]


def _rejected(prompt: Prompt, problem: str) -> DataError:
    return DataError(f"prompt {prompt.index}, turn {prompt.turn}: {problem}", key="data.turns")


def _excerpt(text: str, place: int) -> str:
    return repr(text.encode()[place : place + 20].decode(errors="replace"))
