"""Services whose scores are translated: a teacher in this process, or one at another address."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mopd_client.teacher_client import ClientOptions
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_losses.translation.fitness import fitness
from mopd_losses.translation.translator import Translator
from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import TranslationFacts
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import GatewaySettings, TeacherSettings, TranslationSettings
from mopd_server.translation.prompts import PromptResolver, read_prompts
from mopd_server.translation.remote_engine import RemoteEngine
from mopd_server.translation.teacher_translation import TeacherTranslation


def load_gateway(
    gateway: GatewaySettings,
    settings: TranslationSettings,
    options: ClientOptions | None = None,
) -> TeacherService:
    """Return the service of a teacher at another address; it is not warmed up.

    Raises:
        MopdError: if the teacher is not ready in time, or a setting is invalid.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request, else
    engine = RemoteEngine(gateway, top_k=settings.teacher_top_k, options=options)
    teacher = TeacherSettings(
        model=engine.manifest.model,
        name=gateway.name or engine.manifest.service,
        top_k_max=engine.manifest.max_top_k,
        max_queue_tokens=gateway.max_queue_tokens,
        # The teacher has its own queue.
        max_batch_tokens=gateway.max_queue_tokens,
    )
    return TeacherService(engine.tokenizer, engine, teacher)


@dataclass(frozen=True, eq=False)
class Student:
    """The student's tokenizer, and the prompts that are known."""

    tokenizer: RequestTokenizer
    prompts: PromptResolver

    @classmethod
    def load(cls, settings: TranslationSettings) -> "Student":
        """Load the tokenizer, and register the prompts.

        Raises:
            ConfigError: if the tokenizer cannot be loaded, or has no chat template.
            DataError: if the prompts cannot be read.
            TeacherError: if the chat template rejects a prompt.
        """
        assert settings.student is not None
        tokenizer = load_tokenizer(settings.student, settings.student_revision)
        if not tokenizer.has_chat_template:
            raise ConfigError(
                f"--student {settings.student}: chat template not found (expected a tokenizer with "
                "one)",
                key="student",
            )
        registered = () if settings.prompts is None else read_prompts(settings.prompts)
        variables = template_variables(settings.student_template_arg)
        return cls(tokenizer, PromptResolver(tokenizer, variables, registered))


def add_translation(
    service: TeacherService, student: Student, settings: TranslationSettings
) -> None:
    """Translate the scores of a service for its routes in the student's ids."""
    own, teacher = student.tokenizer, service.tokenizer
    translator = Translator(own.table, own.encoder, teacher.table, teacher.encoder)
    pair = fitness(own.table, teacher.encoder)
    facts = TranslationFacts(
        student=str(settings.student),
        student_fingerprint=own.table.fingerprint,
        verdict=pair.verdict,
        vocabulary=pair.vocabulary,
        texts=dict(pair.texts),
    )
    translation = TeacherTranslation(
        service,
        own,
        student.prompts,
        translator,
        settings,
        template_variables(settings.teacher_template_arg),
    )
    service.translate(translation, facts)


def template_variables(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the variables ``KEY=VALUE`` of a chat template; values are JSON, or else text."""
    variables: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables
