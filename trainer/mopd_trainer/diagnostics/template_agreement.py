"""Both sides' chat templates show the same text of the prompts, or which settings make them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerFast

from mopd_client.tokenizers.teacher import DownloadedTokenizer
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.requests import RESERVED_TEMPLATE_KEYS
from mopd_protocol.samples import Prompt, messages_for
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.diagnostics.renderings import (
    Difference,
    Messages,
    Side,
    first_difference,
    without_thinking,
)
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher

#: Prompts to compare of each form (roles, thinking, spaces), and of all forms.
_PER_FORM, _MOST = 4, 64
#: Settings to offer.
_OFFERED = 3
#: Files that contain a chat template and the names of control tokens.
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_VARIABLES = re.compile(
    r"\b([a-z]\w*) is (?:not )?(?:defined|none|true|false)|if (?:not )?([a-z]\w*)\b"
)
_DATES = re.compile(r"\d{1,2} \w{3,9} \d{4}|\d{4}-\d{2}-\d{2}|\w{3,9} \d{1,2}, \d{4}")
_SYSTEM = "mopdsystemx"
_KINDS = {
    "text": "text that one template adds",
    "message": "a message, or the spaces around it",
    "thinking": "thinking",
    "changed text": "text that one template changes",
    "markup": "markup of one vocabulary",
}
_OTHERWISE = (
    "Set chat_template_kwargs of one side, write the text into the data (a system message), or use "
    "one chat template on both sides."
)


def check_agreement_of_templates(
    prompts: Sequence[Prompt], student: StudentIdentity, teachers: Mapping[str, Teacher]
) -> Iterator[Finding]:
    """Yield a finding per teacher whose chat template is known: the first difference of a prompt.

    Two equal models have a loss where their templates show them different texts. Of a
    teacher with an own prompt, both templates render this prompt.
    """
    own = Side(student.tokenizer, student.chat_template_kwargs)
    for name, teacher in teachers.items():
        chat = _chat_of(teacher)
        if chat is None:
            continue
        side = Side(chat, teacher.config.chat_template_kwargs)
        routed = [prompt for prompt in prompts if name in prompt.teachers]
        same = teacher.manifest.tokenizer_fingerprint == student.table.fingerprint
        yield _finding(name, _chosen(routed), own, side, same_tokens=same)


def _finding(
    name: str, prompts: Sequence[Prompt], student: Side, teacher: Side, *, same_tokens: bool
) -> Finding:
    for prompt in prompts:
        messages = [message.model_dump() for message in messages_for(prompt, name)]
        subject = f"teacher {name!r}: prompt {prompt.index + 1}"
        try:
            student, teacher = student.with_tools(prompt.tools), teacher.with_tools(prompt.tools)
            difference = first_difference(messages, student, teacher, same_tokens=same_tokens)
        except Exception as error:  # a template may raise any
            roles = ", ".join(message.role for message in messages_for(prompt, name))
            return Finding(
                "templates",
                "warning",
                f"{subject} cannot be rendered by both templates (roles {roles}): {error}.",
                "Change the roles in the data, or the chat template.",
                {"prompt": float(prompt.index + 1)},
            )
        if difference is not None:
            settings = _settings(name, messages, student, teacher, same_tokens=same_tokens)
            return _described(subject, prompt, difference, settings)
    text = f"teacher {name!r}: both templates show the text of {len(prompts)} prompts."
    return Finding("templates", "ok", text)


def _described(
    subject: str, prompt: Prompt, difference: Difference, settings: Sequence[str]
) -> Finding:
    own, other = difference.positions
    text = (
        f"{subject} differs between the templates in {_KINDS[difference.kind]}: at byte {own} the "
        f"student has {difference.excerpts[0]!r}, at byte {other} the teacher has "
        f"{difference.excerpts[1]!r}."
    )
    numbers = {"prompt": prompt.index + 1, "student_byte": own, "teacher_byte": other}
    return Finding(
        "templates",
        "warning",
        text,
        " Or: ".join(settings[:_OFFERED]) or _OTHERWISE,
        {name: float(value) for name, value in numbers.items()},
    )


def _settings(
    name: str, messages: Messages, student: Side, teacher: Side, *, same_tokens: bool
) -> list[str]:
    """Return changes of settings or data with which the templates agree on a prompt."""
    sides = {"student": student, f"teachers.{name}": teacher}
    texts = [side.render(messages) for side in sides.values()]
    dates = list(dict.fromkeys(date for text in texts for date in _DATES.findall(text)))
    candidates: list[tuple[str, Messages, dict[str, Side]]] = []
    for key, side in sides.items():
        for variable in _variables(side):
            for value in (False, True, *dates):
                variables = {**side.variables, variable: value}
                shown = str(value).lower() if isinstance(value, bool) else f'"{value}"'
                change = f"Set {key}.chat_template_kwargs={{{variable}: {shown}}}."
                changed = {**sides, key: replace(side, variables=variables)}
                candidates.append((change, messages, changed))
    for side in sides.values():
        default = _default_system(side, messages)
        if default:
            explicit = [{"role": "system", "content": default}, *messages]
            change = f"Begin the conversations of the data with the system message {default!r}."
            candidates.append((change, explicit, sides))
    candidates += [
        ("Remove the thinking of earlier turns from the data.", without_thinking(messages), sides),
        (
            "Remove the spaces around the messages of the data.",
            [{**message, "content": message["content"].strip()} for message in messages],
            sides,
        ),
    ]
    agreeing: list[str] = []
    for change, changed, both in candidates:
        try:
            rest = first_difference(changed, *both.values(), same_tokens=same_tokens)
        except Exception:
            continue
        if rest is None:
            agreeing.append(change)
    return agreeing


def _variables(side: Side) -> list[str]:
    """Return the names of the variables that a template tests."""
    template = side.chat.chat_template
    text = template if isinstance(template, str) else " ".join(map(str, template.values()))
    names = (name for pair in _VARIABLES.findall(text) for name in pair if name)
    return [name for name in dict.fromkeys(names) if name not in RESERVED_TEMPLATE_KEYS]


def _default_system(side: Side, messages: Messages) -> str:
    """Return the system prompt that a template adds to a conversation without one; may be empty."""
    if messages[0]["role"] == "system":
        return ""
    try:
        explicit = side.render([{"role": "system", "content": _SYSTEM}, *messages])
    except Exception:  # a template without system messages may raise any
        return ""
    before, _, after = explicit.partition(_SYSTEM)
    rendering = side.render(messages)
    fits = rendering.startswith(before) and rendering.endswith(after)
    length = len(rendering) - len(after)
    return rendering[len(before) : length].strip() if fits and length > len(before) else ""


def _chosen(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompts of each form, so that rare forms are compared, too."""
    forms: Counter[tuple[object, ...]] = Counter()
    chosen: list[Prompt] = []
    for prompt in prompts:
        form = tuple(
            (message.role, "</" in message.content, message.content != message.content.strip())
            for message in prompt.messages
        )
        forms[form] += 1
        if forms[form] <= _PER_FORM:
            chosen.append(prompt)
        if len(chosen) == _MOST:
            break
    return chosen


def _chat_of(teacher: Teacher) -> Any:
    """Return a tokenizer with the teacher's chat template; None if it is not known."""
    tokenizer = teacher.tokenizer
    if isinstance(tokenizer, RequestTokenizer):
        return tokenizer.chat if tokenizer.has_chat_template else None
    if not isinstance(tokenizer, DownloadedTokenizer) or not tokenizer.files:
        return None  # of a recording
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = {name: tokenizer.files[name] for name in _FILES if name in tokenizer.files}
        for file, text in (files | {"tokenizer.json": tokenizer.tokenizer.to_str()}).items():
            (folder / file).write_text(text, encoding="utf-8")
        chat = PreTrainedTokenizerFast.from_pretrained(folder)
    return chat if chat.chat_template else None
