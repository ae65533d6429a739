"""The student's rendering of prompts, and the tokenizer that renders them."""

from collections.abc import Iterator, Sequence

from transformers import AutoTokenizer

from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Prompt
from mopd_protocol.tokenizers.pretrained import encoding_difference
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.student.identity import StudentIdentity, source

_CHECKED = 64
#: Openings of a block that the student would have to continue.
_THINKING = ("<think>", "<thinking>", "<|thinking|>")


def check_templates(prompts: Sequence[Prompt], student: StudentIdentity) -> Iterator[Finding]:
    """Yield a finding on the rendered prompts: user's text, beginning of text, thinking block."""
    table = student.table
    for prompt in prompts[:_CHECKED]:
        ids = student.prompt_token_ids(prompt.messages, prompt.tools)
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
    prompts: Sequence[Prompt], config: StudentConfig, student: StudentIdentity
) -> Iterator[Finding]:
    """Yield a finding on reloading: of the trained model's tokenizer, and of the published one."""
    try:
        student.tokenizer_files.require_reloadable()
    except ConfigError as error:
        yield Finding("tokenizer", "failed", str(error))
        return
    texts = [message.content for prompt in prompts[:_CHECKED] for message in prompt.messages]
    texts += [prompt.answer for prompt in prompts[:_CHECKED] if prompt.answer]
    other = encoding_difference(
        student.tokenizer, AutoTokenizer.from_pretrained, config.model, texts, **source(config)
    )
    if other:
        yield Finding(
            "tokenizer",
            "warning",
            f"AutoTokenizer of transformers, of {config.model}: {other}, which tokenizer.json "
            "defines. mopd uses tokenizer.json, and saves a model that reloads as that.",
            "Load the published model with PreTrainedTokenizerFast to compare it.",
        )
        return
    text = f"{len(texts) + 1} texts encode as tokenizer.json does; the saved tokenizer reloads."
    yield Finding("tokenizer", "ok", text)
