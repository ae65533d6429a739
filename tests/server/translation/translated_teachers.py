"""Tiny teachers whose scores are translated, and a translator between equal tokenizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray

from mopd_client.transport.clock import Clock
from mopd_losses.translation.translation import Coverage, ExtraRow, Translation
from mopd_protocol.manifest import TranslationFacts
from mopd_protocol.samples import Message, TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.app import create_app
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import GatewaySettings, TranslationSettings
from mopd_server.translation.loading import load_gateway
from mopd_server.translation.prompts import PromptResolver
from mopd_server.translation.teacher_translation import TeacherTranslation
from tests.server.tiny_teachers import TinyTeacher, request_async, teacher_of_family

FACTS = TranslationFacts(
    student="same", student_fingerprint="", verdict="fit", vocabulary=1.0, texts={}
)


@dataclass
class IdentityTranslator:
    """Exact between equal tokenizers: every entry is a token of the student.

    ``requested`` rows are requested first; ``known`` is what was received. ``lost`` and ``unknown``
    are the rows of each completion with such a coverage.
    """

    requested: list[ExtraRow] = field(default_factory=list)
    known: dict[ExtraRow, TopKLogprobs] = field(default_factory=dict)
    completions: list[TokenSequence] = field(default_factory=list)
    scores: list[TeacherScore] = field(default_factory=list)
    lost: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> "IdentityTranslator":
        self.completions, self.scores, self.known = list(completions), list(scores), {}
        return self

    @property
    def extra_rows(self) -> list[ExtraRow]:
        return [each for each in self.requested if each not in self.known]

    def add(self, rows: Mapping[ExtraRow, TopKLogprobs]) -> None:
        self.known |= rows

    def translations(self) -> list[Translation]:
        for completion, score in zip(self.completions, self.scores, strict=True):
            assert completion.token_ids.tolist() == score.token_ids.tolist()
        return [self._translation(score.topk) for score in self.scores]

    def _translation(self, topk: TopKLogprobs) -> Translation:
        def rows(chosen: tuple[int, ...]) -> NDArray[np.bool_]:
            return np.isin(np.arange(len(topk)), chosen)

        mass = np.exp(topk.logprobs).sum(axis=1)
        return Translation(topk, Coverage(mass, rows(self.lost), ~rows(self.unknown)))


@dataclass(frozen=True)
class TranslatedTeacher:
    """A teacher, and the application that translates its scores to its own tokenizer."""

    teacher: TinyTeacher
    plain: FastAPI
    app: FastAPI
    service: TeacherService
    translator: IdentityTranslator
    prompts: PromptResolver

    def ids(self, messages: Sequence[Message], *pieces: str | int) -> tuple[int, list[int]]:
        """Return the number of ids of a prompt, and the ids of prompt and completion."""
        prompt, ids = self.prompts.render(messages), list[int]()
        for piece in pieces:
            encoder = self.teacher.tokenizer.encoder
            ids += [piece] if isinstance(piece, int) else encoder.encode(piece)
        return len(prompt), prompt + ids

    @property
    def end(self) -> int:
        """The end of a turn."""
        end = self.teacher.tokenizer.table.roles.end_of_turn
        assert end is not None
        return end


def translated_teacher(
    family: str,
    *,
    gateway: bool,
    registered: Sequence[Sequence[Message]] = (),
    clock: Clock | None = None,
    **settings: Any,
) -> TranslatedTeacher:
    """Return a teacher with a translation in its process, or with a gateway in front."""
    teacher, translator = teacher_of_family(family), IdentityTranslator()
    plain = teacher.app
    translation = TranslationSettings(student="same", teacher_top_k=16, **settings)
    if gateway:
        address = GatewaySettings(teacher="http://teacher", teacher_wait_seconds=60)
        options: Any = {"transport": httpx.ASGITransport(plain), "clock": clock}
        service = load_gateway(address, translation, options)
        service.warm_up()
    else:
        service = teacher_of_family(family).service
    prompts = PromptResolver(teacher.tokenizer, {}, registered)
    service.translate(
        TeacherTranslation(service, teacher.tokenizer, prompts, translator, translation), FACTS
    )
    return TranslatedTeacher(teacher, plain, create_app(service), service, translator, prompts)


def translated(service: TeacherService, translator: IdentityTranslator) -> PromptResolver:
    """Add a translation to the teacher's own tokenizer."""
    prompts = PromptResolver(service.tokenizer, {})
    settings = TranslationSettings(student="same", teacher_top_k=16)
    translation = TeacherTranslation(service, service.tokenizer, prompts, translator, settings)
    service.translate(translation, FACTS)
    return prompts


async def completions(
    app: FastAPI, prompt: Any, *, k: int = 4, headers: Any = None, **fields: Any
) -> httpx.Response:
    """Send a request of ``/v1/completions``."""
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": k, **fields}
    return await request_async(app, "POST", "/v1/completions", body, headers)


async def rows_of(app: FastAPI, prompt: Sequence[int], **fields: Any) -> list[Any]:
    """Return ``prompt_logprobs`` of a request that must succeed."""
    response = await completions(app, [list(prompt)], **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["prompt_logprobs"]
