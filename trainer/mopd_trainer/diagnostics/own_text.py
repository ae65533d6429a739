"""A teacher's own completions are as likely when they are tokenized again from their text.

A loss across tokenizers compares rows of the text as the teacher's tokenizer divides it. A teacher
that was trained on other divisions (of parts that were tokenized separately, or with another
normalizer) finds even its own text unlikely, and its rows teach nothing.
"""

from collections.abc import AsyncIterator, Sequence

import numpy as np

from mopd_client.pool import ScoringClient
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Prompt, messages_for
from mopd_protocol.tokenizers.token_sequence import valid_utf8
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.diagnostics.case import Case
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.evaluation.teacher_model import TeacherModel
from mopd_trainer.teachers.connect import Teacher

#: Completions of each teacher, and their length: a request per token generates them.
_PROMPTS, _TOKENS = 4, 32
#: Nats per token above which the divisions differ by more than a rare token.
_LIMIT = 0.1


async def check_own_text(case: Case) -> AsyncIterator[Finding]:
    """Yield a finding per teacher that receives text: its greedy completions, tokenized again.

    Raises:
        MopdError: when scoring fails.
    """
    own = case.student.table.fingerprint
    for name, teacher in case.teachers.items():
        prompts = [prompt for prompt in case.prompts if name in prompt.teachers][:_PROMPTS]
        receives_text = teacher.manifest.tokenizer_fingerprint != own
        if prompts and receives_text and teacher.config.support != "full":
            limit = min(_TOKENS, case.config.rollout.max_new_tokens)
            yield await _finding(case.pool.client(name), teacher, prompts, limit)


async def _finding(
    client: ScoringClient, teacher: Teacher, prompts: Sequence[Prompt], limit: int
) -> Finding:
    """Generate completions of at most ``limit`` tokens, and compare the scores."""
    check, name, table = "own text", f"teacher {teacher.name!r}", teacher.tokenizer.table
    variables = teacher.config.chat_template_kwargs or None
    model = TeacherModel(
        client,
        table,
        max_top_k=teacher.manifest.max_top_k,
        chat_template_kwargs=variables,
        name=teacher.name,
    )
    generated = await model.greedy_token_ids(prompts, limit)
    written = [_text_of(table, ids) for ids in generated]
    by_ids, by_text = list[SequenceRequest](), list[SequenceRequest]()
    for prompt, (ids, text) in zip(prompts, written, strict=True):
        if ids:
            request = SequenceRequest(
                messages=list(messages_for(prompt, teacher.name)),
                tools=list(prompt.tools),
                chat_template_kwargs=variables,
                completion_token_ids=ids,
            )
            by_ids.append(request)
            again = {"completion_token_ids": None, "completion": text}
            by_text.append(request.model_copy(update=again))
    if not by_ids:
        text = f"{name}: its {len(prompts)} greedy completions have no text."
        return Finding(check, "warning", text, "Check its chat template and its weights.")
    scores = await client.score([*by_ids, *by_text], top_k=1)
    pairs = list(zip(scores[: len(by_ids)], scores[len(by_ids) :], strict=True))
    tokens = sum(len(each.completion) for each, _ in pairs)
    nats = sum(float(each.logprobs.sum() - again.logprobs.sum()) for each, again in pairs) / tokens
    changed = sum(not np.array_equal(each.token_ids, again.token_ids) for each, again in pairs)
    text = (
        f"{name}: {changed} of its {len(pairs)} greedy completions have other tokens when their "
        f"text is tokenized; they are {nats:.2g} nats per token less likely (limit {_LIMIT:g})."
    )
    fix = (
        "Serve it with the tokenizer of its training; if it was trained on parts that were "
        "tokenized separately, train it on whole texts."
    )
    numbers = {"nats": nats, "changed": float(changed)}
    return Finding(check, "ok" if nats <= _LIMIT else "warning", text, fix, numbers)


def _text_of(table: TokenTable, ids: list[int]) -> tuple[list[int], str]:
    """Return the ids up to the first control token or incomplete character, and their text."""
    ids = ids[: min(table.sequence(ids).marks, default=len(ids))]
    while valid_utf8(text := table.sequence(ids).text) != text:
        ids = ids[:-1]
    return ids, text.decode()
