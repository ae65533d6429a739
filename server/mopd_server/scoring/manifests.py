"""Manifests of a service: of its model, and of its adapters."""

from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_server.engines.base import EngineDescription
from mopd_server.settings import TeacherSettings


def manifests_of(
    tokenizer: RequestTokenizer, description: EngineDescription, settings: TeacherSettings
) -> dict[str | None, Manifest]:
    """Return name of an adapter, None for the base model -> manifest."""
    base = _manifest(tokenizer, description, settings)
    return {None: base} | {
        adapter.name: base.model_copy(
            update={
                "service": adapter.name,
                "model": adapter.model(base.model),
                "revision": adapter.revision(base.revision),
            }
        )
        for adapter in description.adapters
    }


def _manifest(
    tokenizer: RequestTokenizer, description: EngineDescription, settings: TeacherSettings
) -> Manifest:
    table = tokenizer.table
    return Manifest(
        service=settings.service_name,
        model=description.model,
        revision=description.revision,
        engine=description.engine,
        engine_version=description.engine_version,
        dtype=description.dtype,
        logit_width=description.logit_width,
        tokenizer_fingerprint=table.fingerprint,
        tokenizer_size=table.size,
        roles=table.roles,
        chat_template_hash=tokenizer.chat_template_hash,
        max_model_len=description.max_model_len,
        max_top_k=min(settings.top_k_max, int(table.present.sum())),
        features=Features(
            candidate_ids=description.candidate_ids,
            temperature=description.temperature,
            messages=tokenizer.has_chat_template,
            exact_tails=description.exact_tails,
            exact_text=table.exact_text,
        ),
    )
