"""``TeacherTranslation``: scores of a teacher in the ids of one student.

Find the prompt's messages -> send the completion's text -> request extra rows -> translate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from mopd_losses.translation.translation import ExtraRow, Translation
from mopd_protocol.errors import TeacherError
from mopd_protocol.request_tokenizer import RequestTokenizer, TokenizedSequence
from mopd_protocol.samples import Message, TeacherScore
from mopd_protocol.teacher_input import text_input
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_server.engines.base import ScoringTask
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.translation import TranslatedPrompt
from mopd_server.service_error import ServiceError
from mopd_server.settings import TranslationSettings
from mopd_server.translation.completion import StudentCompletion, first_tokens
from mopd_server.translation.coverage import TranslationMetrics, report_of
from mopd_server.translation.prompts import PromptResolver


class PendingScores(Protocol):
    """The interface of ``mopd_losses.translation.translator.PendingTranslation``."""

    @property
    def extra_rows(self) -> list[ExtraRow]:
        """Rows without which likely text stays in the tail."""
        ...

    def add(self, rows: Mapping[ExtraRow, TopKLogprobs]) -> None:
        """Continue with requested rows."""
        ...

    def translations(self) -> list[Translation]:
        """Return the translation of each completion."""
        ...


class TextTranslator(Protocol):
    """The interface of ``mopd_losses.translation.translator.Translator``."""

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> PendingScores:
        """Translate scores as far as they go."""
        ...


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A sequence, its completion, and the completion in the teacher's tokens."""

    ids: Sequence[int]
    completion: StudentCompletion
    sent: TokenSequence  # the tokens whose text was sent
    tokens: TokenizedSequence


class TeacherTranslation:
    """The ``Translation`` of one service.

    Args:
        service: of the teacher.
        student: tokenizer of the student.
        prompts: finds the messages behind the student's ids.
        translator: between the two tokenizers.
        settings: limits of the teacher's requests.
        variables: of the teacher's chat template.
    """

    def __init__(
        self,
        service: TeacherService,
        student: RequestTokenizer,
        prompts: PromptResolver,
        translator: TextTranslator,
        settings: TranslationSettings,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.student = student
        self._prompts = prompts
        self._service = service
        self._translator = translator
        self._settings = settings
        self._variables = dict(variables)
        self._metrics = TranslationMetrics(service.metrics.registry)

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message] | None],
        *,
        field: str,
        top_k: int,
        adapter: str | None,
        admit: Callable[[int, int], None] | None,
        key: str,
    ) -> tuple[list[TranslatedPrompt], Mapping[str, float]]:
        """See ``Translation.score``."""
        run, service = self._service.run_in_thread, self._service
        prepared = await run(lambda: self._prepare(sequences, messages, field), large=True)
        tasks = [
            ScoringTask(each.tokens.prompt_ids, each.tokens.completion.token_ids, adapter=adapter)
            for each in prepared
        ]
        teacher_top_k = min(max(self._settings.teacher_top_k, top_k), service.manifest.max_top_k)
        rows, timings = await service.score_tasks(
            tasks, top_k=teacher_top_k, temperature=1.0, admit=admit, key=key
        )
        manifest_id = service.manifests[adapter].manifest_id
        completions = [each.sent for each in prepared]
        scores = [
            TeacherScore(manifest_id, each.tokens.completion, topk)
            for each, topk in zip(prepared, rows, strict=True)
        ]
        pending = await run(lambda: self._translator.begin(completions, scores), large=True)
        counts = [0] * len(prepared)
        for _ in range(self._settings.extra_rounds):
            selected = self._next_rows(pending, counts)
            if not selected:
                break
            extra_tasks = [self._extra_task(prepared, each, adapter) for each in selected]
            extra, _ = await service.score_tasks(
                extra_tasks, top_k=teacher_top_k, temperature=1.0, key=key
            )
            received = dict(zip(selected, extra, strict=True))
            await run(partial(pending.add, received), large=True)
        translated = await run(
            lambda: [
                _at_positions(each, translation, top_k, count)
                for each, translation, count in zip(
                    prepared, pending.translations(), counts, strict=True
                )
            ],
            large=True,
        )
        for each in translated:
            self._metrics.add(each.coverage)
        return translated, timings

    def _prepare(
        self,
        sequences: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message] | None],
        field: str,
    ) -> list[_Prepared]:
        prepared: list[_Prepared] = []
        for index, (ids, conversation) in enumerate(zip(sequences, messages, strict=True)):
            name = f"{field}[{index}]"
            try:
                prepared.append(self._prepare_one(ids, conversation, name))
            except ServiceError:
                raise
            except TeacherError as error:
                status = error.status or HTTPStatus.BAD_REQUEST
                key = f"{name}.{error.key}"
                raise ServiceError(status, f"{name}: {error}", key=key) from error
        return prepared

    def _prepare_one(
        self, ids: Sequence[int], messages: Sequence[Message] | None, field: str
    ) -> _Prepared:
        prompt = self._prompts.resolve(ids, messages, field)
        completion = StudentCompletion.of(ids, prompt.tokens, self.student.table)
        tokenizer, longest = self._service.tokenizer, self._service.manifest.max_model_len
        teacher_input = text_input(
            prompt.messages, completion.sequence, self.student.table, tokenizer.encoder
        )
        request = teacher_input.request
        if self._variables:
            request = request.model_copy(update={"chat_template_kwargs": self._variables})
        tokens = tokenizer.tokenize(request, max_tokens=longest)
        tokens.require_length(longest)
        sent = first_tokens(teacher_input.completion, teacher_input.sent_tokens)
        return _Prepared(ids, completion, sent, tokens)

    def _next_rows(self, pending: PendingScores, counts: list[int]) -> list[ExtraRow]:
        """Return the next extra rows, within the limit of each completion, and count them."""
        selected: list[ExtraRow] = []
        for each in pending.extra_rows:
            if counts[each.completion] < self._settings.extra_rows:
                counts[each.completion] += 1
                selected.append(each)
        return selected

    def _extra_task(
        self, prepared: Sequence[_Prepared], row: ExtraRow, adapter: str | None
    ) -> ScoringTask:
        """Return the task whose only row is the extra row; its completion can be any token."""
        tokens = prepared[row.completion].tokens
        behind = [
            *tokens.completion.token_ids[: row.teacher_tokens].tolist(),
            *row.token_ids,
        ]
        prompt = np.concatenate([tokens.prompt_ids, np.array(behind, dtype=np.int32)])
        return ScoringTask(prompt, tokens.prompt_ids[:1], adapter=adapter)


def _at_positions(
    prepared: _Prepared, translation: Translation, top_k: int, extra_rows: int
) -> TranslatedPrompt:
    """Move the rows of a completion to their positions among the ids."""
    count, start = len(prepared.ids), prepared.completion.start
    rows, textless = prepared.completion.rows(count)
    coverage, narrow = translation.coverage, narrowed(translation.topk, top_k)
    rows[rows >= len(narrow)] = -1  # their text was not sent
    report = report_of(
        coverage if len(narrow) else None,
        rows[start:],
        prompt_tokens=start,
        extra_rows=extra_rows,
    )
    known = rows >= 0
    signal = np.zeros(count, dtype=np.bool_)
    signal[known] = coverage.has_signal[rows[known]]
    ids = np.full((count, top_k), ABSENT_ID, dtype=np.int32)
    logprobs = np.full((count, top_k), -np.inf, dtype=np.float32)
    token_logprobs = np.zeros(count, dtype=np.float32)
    tail_logprobs = np.zeros(count, dtype=np.float32)
    ids[known, : narrow.k] = narrow.ids[rows[known]]
    logprobs[known, : narrow.k] = narrow.logprobs[rows[known]]
    token_logprobs[known] = narrow.token_logprobs[rows[known]]
    tail_logprobs[known] = narrow.tail_logprobs[rows[known]]
    token_logprobs[known & textless] = -np.inf
    topk = TopKLogprobs(ids, logprobs, token_logprobs, tail_logprobs)
    return TranslatedPrompt(topk.rows(1, count), ~(known & signal)[1:], ~known[1:], report)


def narrowed(topk: TopKLogprobs, k: int) -> TopKLogprobs:
    """Return at most the ``k`` likeliest entries of each row; the others go to the tail."""
    if topk.k <= k:
        return topk
    tails = np.concatenate([topk.tail_logprobs[:, None], topk.logprobs[:, k:]], axis=1)
    return TopKLogprobs(
        topk.ids[:, :k],
        topk.logprobs[:, :k],
        topk.token_logprobs,
        np.minimum(np.logaddexp.reduce(tails, axis=1), 0.0),
    )
