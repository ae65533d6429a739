"""``TranslatedPromptScorer``: the ``PromptScorer`` of a service with a student, in its ids."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from http import HTTPStatus

import numpy as np

from mopd_protocol.arrays import IntArray
from mopd_protocol.requests import LOSS_HEADER
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers.token_table import encode_prompt
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_server.compatible.prompt_scorer import (
    AdmitTokens,
    PromptLimits,
    PromptScorer,
    PromptScores,
    TeacherPromptScorer,
)
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.translation import TranslatedPrompt, Translation
from mopd_server.service_error import ServiceError, invalid_field

#: Messages of one prompt, or of several.
Messages = list[Message] | list[list[Message]]

#: Values of ``LOSS_HEADER`` that a translation supports.
SUPPORTED_LOSSES = ("tail", "token")

#: Ids of a padded head behind the tokenizer's own: published heads have up to 500.
_PADDING = 1024
#: A student's tokens per token of the teacher; beyond, a sequence is certainly too long.
_TOKENS_PER_TOKEN = 16


class TranslatedPromptScorer:
    """See ``PromptScorer``.

    Args:
        service: of the teacher, with its limits.
        translation: to the student.
        adapter: of the teacher.
        field: name of the prompts in errors.
        messages: of the prompts, if the request has them.
        loss: header of the request; for ``token``, only realised tokens are returned.
    """

    def __init__(
        self,
        service: TeacherService,
        translation: Translation,
        adapter: str | None,
        field: str,
        messages: Messages | None,
        loss: str | None,
    ) -> None:
        self._manifest = service.manifests[adapter]
        self._translation = translation
        self._adapter = adapter
        self._field = field
        self._messages = messages
        self._loss = loss

    @property
    def limits(self) -> PromptLimits:
        """See ``PromptScorer.limits``; the teacher's tokens are counted later."""
        return PromptLimits(
            width=self._translation.student.table.size + _PADDING,
            max_tokens=_TOKENS_PER_TOKEN * self._manifest.max_model_len,
            max_top_k=self._manifest.max_top_k,
        )

    def encode(self, text: str) -> list[int]:
        """See ``PromptScorer.encode``."""
        try:
            return encode_prompt(self._translation.student.tokenizer, text)
        except UnicodeEncodeError as error:
            raise invalid_field(self._field, f"invalid Unicode: {error}") from error

    async def score(
        self,
        prompts: Sequence[IntArray],
        *,
        top_k: int,
        temperature: float,
        admit: AdmitTokens,
        key: str,
    ) -> PromptScores:
        """See ``PromptScorer.score``; the messages behind the prompts must be known."""
        if temperature != 1.0:
            raise invalid_field(
                "temperature",
                f"found {temperature}, expected 1: the probability of a text is a product of "
                "probabilities at temperature 1",
            )
        translated, timings = await self._translation.score(
            [ids.tolist() for ids in prompts],
            self._messages_of(len(prompts)),
            field=self._field,
            top_k=top_k,
            adapter=self._adapter,
            admit=admit,
            key=key,
        )
        if self._loss == "token":
            pairs = zip(prompts, translated, strict=True)
            translated = [_realised_only(ids, each) for ids, each in pairs]
        return PromptScores(
            topk=[each.topk for each in translated],
            timings=timings,
            unknown=[each.unknown for each in translated],
            fields=[{"mopd_coverage": asdict(each.coverage)} for each in translated],
        )

    def _messages_of(self, count: int) -> Sequence[Sequence[Message] | None]:
        if self._messages is None:
            return [None] * count
        lists = [each for each in self._messages if isinstance(each, list)]
        single = [each for each in self._messages if isinstance(each, Message)]
        conversations = lists or [single]
        if len(conversations) != count:
            raise invalid_field(
                "messages",
                f"found {len(conversations)} conversations for {count} prompts, expected one each",
            )
        return conversations


def scorer_of(
    service: TeacherService,
    adapter: str | None,
    field: str,
    messages: Messages | None,
    loss: str | None,
) -> PromptScorer:
    """Return the scorer of a teacher, in the student's ids if the service has one.

    Args:
        field: name of the prompts in errors.
        messages: of the prompts, if the request has them.
        loss: header ``LOSS_HEADER``, or the loss of a client that is known not to send it.

    Raises:
        ServiceError: 400 for a loss that a translation does not support, and for messages without a
            student: the ids contain the prompt.
    """
    if service.translation is not None:
        _require_supported(loss)
        return TranslatedPromptScorer(service, service.translation, adapter, field, messages, loss)
    if messages is not None:
        raise invalid_field("messages", "supported by a service with --student only")
    return TeacherPromptScorer(service, adapter)


def _require_supported(loss: str | None) -> None:
    """Reject losses whose optimum is wrong if likely tokens are not named."""
    if loss is not None and loss not in SUPPORTED_LOSSES:
        raise ServiceError(
            HTTPStatus.BAD_REQUEST,
            f"{LOSS_HEADER}: loss {loss!r} not supported with a translation (expected "
            f"{' or '.join(SUPPORTED_LOSSES)}). Without a tail, its optimum gives the named tokens "
            "the probability of all others. Use a loss with a tail, such as those of "
            "mopd.integrations.verl.",
            code="unsupported_loss",
            key=LOSS_HEADER,
        )


def _realised_only(ids: IntArray, translated: TranslatedPrompt) -> TranslatedPrompt:
    """Return rows with the realised token only, where the probability of its text is known."""
    topk = translated.topk
    unknown = translated.unscored | np.isneginf(topk.token_logprobs)
    logprobs = np.where(unknown, -np.inf, topk.token_logprobs)
    tokens = np.where(unknown, ABSENT_ID, ids[1:])
    rows = TopKLogprobs(tokens[:, None], logprobs[:, None], topk.token_logprobs, topk.tail_logprobs)
    return replace(translated, topk=rows, unknown=unknown)
