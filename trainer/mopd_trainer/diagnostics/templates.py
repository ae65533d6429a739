"""The student's rendering of prompts, and the tokenizer that renders them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mopd_protocol.samples import Prompt
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.student.identity import StudentIdentity

_CHECKED = 64
#: Openings of a block that the student would have to continue.
_THINKING = ("<think>", "<thinking>", "<|thinking|>")


def check_templates(prompts: Sequence[Prompt], student: StudentIdentity) -> Iterator[Finding]:
    """Yield a finding on the rendered prompts: user's text, beginning of text, thinking block."""
    table = student.table
    for prompt in prompts[:_CHECKED]:
        ids = student.prompt_token_ids(prompt.messages)
        text = table.sequence(ids).text.decode("utf-8", "replace")
        problem = ""
        if any(message.content.strip() not in text for message in prompt.messages):
            problem = "lacks the text of a message"
        elif table.roles.bos is not None and ids[:2] == [table.roles.bos] * 2:
            problem = "begins with two beginning-of-text tokens"
        elif _opens_thinking(student, ids):
            problem = "ends inside a thinking block"
        if problem:
            yield Finding(
                "templates",
                "warning" if "thinking" in problem else "failed",
                f"the student's rendering of prompt {prompt.index + 1} {problem}.",
                "Fix the chat template of the student.",
            )
            return
    checked = min(len(prompts), _CHECKED)
    yield Finding("templates", "ok", f"the student renders {checked} prompts completely.")


def _opens_thinking(student: StudentIdentity, ids: Sequence[int]) -> bool:
    tokens = [str(student.tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids[-4:]]
    return any(each in _THINKING for each in tokens) and not any("</" in each for each in tokens)


def check_tokenizer(
    prompts: Sequence[Prompt], model: Path, student: StudentIdentity
) -> Iterator[Finding]:
    """Yield a finding on the loaded tokenizer: it encodes as the ``tokenizer.json`` does."""
    path = model / "tokenizer.json"
    if not model.is_dir():  # a name of the hub
        return
    if not path.is_file():
        yield Finding("tokenizer", "warning", f"{path} not found; not compared.")
        return
    backend: Any = student.tokenizer
    published, loaded = Tokenizer.from_file(str(path)), backend.backend_tokenizer
    texts = [message.content for prompt in prompts[:_CHECKED] for message in prompt.messages]
    texts += [prompt.answer for prompt in prompts[:_CHECKED] if prompt.answer]
    for text in [*texts, "1234567 don't  \n\t naïve 漢字 🙂"]:
        expected = published.encode(text, add_special_tokens=False).ids
        actual = loaded.encode(text, add_special_tokens=False).ids
        if actual != expected:
            yield Finding(
                "tokenizer",
                "failed",
                f"the loaded tokenizer encodes {text[:40]!r} to {len(actual)} tokens "
                f"{actual[:6]}, tokenizer.json to {len(expected)} {expected[:6]}.",
                "Use another version of transformers, or fix tokenizer_class in "
                "tokenizer_config.json.",
            )
            return
    yield Finding("tokenizer", "ok", f"{len(texts) + 1} texts encode as tokenizer.json does.")
