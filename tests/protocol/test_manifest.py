"""The manifest id changes with everything that affects scores, and with nothing else."""

from typing import Any

import pytest
from pydantic import ValidationError

from mopd_protocol.manifest import SCHEMA_VERSION, Features, Manifest, TranslationFacts
from mopd_protocol.tokenizers.token_table import TokenRoles


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "service": "math",
        "model": "org/model",
        "revision": "abc",
        "engine": "transformers",
        "engine_version": "5.23",
        "dtype": "float32",
        "logit_width": 512,
        "tokenizer_fingerprint": "f" * 32,
        "tokenizer_size": 420,
        "roles": TokenRoles(eos=3),
        "chat_template_hash": "c" * 32,
        "max_model_len": 256,
        "max_top_k": 64,
        "features": Features(candidate_ids=True, temperature=True, messages=True),
    }
    return Manifest(**{**fields, **changes})


DECISIVE: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION + 1,
    "model": "org/other",
    "revision": "abd",
    "engine": "vllm",
    "engine_version": "5.24",
    "dtype": "bfloat16",
    "logit_width": 513,
    "tokenizer_fingerprint": "e" * 32,
    "tokenizer_size": 421,
    "roles": TokenRoles(eos=4),
    "chat_template_hash": None,
    "features": Features(candidate_ids=True, temperature=False, messages=True),
}
TRANSLATION = TranslationFacts(
    student="org/student",
    student_fingerprint="d" * 32,
    verdict="fit",
    vocabulary=0.9,
    texts={"English": 0.99},
)
FREE: dict[str, Any] = {
    "service": "code",
    "max_model_len": 512,
    "max_top_k": 8,
    "translation": TRANSLATION,
}


@pytest.mark.parametrize("field", DECISIVE)
def test_what_affects_scores_changes_the_id(field):
    assert manifest(**{field: DECISIVE[field]}).manifest_id != manifest().manifest_id


@pytest.mark.parametrize("field", FREE)
def test_a_name_or_a_limit_does_not_change_the_id(field):
    assert manifest(**{field: FREE[field]}).manifest_id == manifest().manifest_id


def test_every_field_is_either_decisive_or_free():
    assert {*DECISIVE, *FREE} == set(Manifest.model_fields)


def test_a_manifest_is_read_back_from_its_json_with_the_same_id():
    written = manifest().model_dump(mode="json")

    assert Manifest.parse(written) == manifest()
    assert written["manifest_id"] == manifest().manifest_id
    assert len(written["manifest_id"]) == 32


def test_only_a_service_with_a_student_has_a_translation_in_its_json():
    translated = manifest(translation=TRANSLATION).model_dump(mode="json")

    assert "translation" not in manifest().model_dump(mode="json")
    assert Manifest.parse(translated).translation == TRANSLATION


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="surprise"):
        Manifest.parse({**manifest().model_dump(mode="json"), "surprise": 1})
