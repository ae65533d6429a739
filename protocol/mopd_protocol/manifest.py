"""``Manifest``: identity of a teacher, with a hash of everything that affects its scores."""

import hashlib
import json
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    computed_field,
    model_serializer,
)

from mopd_protocol.tokenizers.token_table import TokenRoles

#: Version of the wire format. A client rejects a service of another version.
SCHEMA_VERSION = 2

#: Header of every response to a request with a valid key: the ``manifest_id`` of the teacher.
MANIFEST_HEADER = "Mopd-Manifest"


class Features(BaseModel):
    """Features of this teacher's engine beyond its own top-k at temperature 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate_ids: bool
    """Exact logprobs of ids that the caller chooses."""
    temperature: bool
    """Distributions at a softmax temperature other than 1."""
    messages: bool
    """Renders messages with the model's own chat template."""
    exact_tails: bool = False
    """Tails are computed from the logits: the entries and the tail of a row add up to one."""
    exact_text: bool = False
    """The tokens of a text spell its bytes, up to Unicode normalization (NFC)."""


class TranslationFacts(BaseModel):
    """A service that also returns scores in the ids of a student, and its fitness for that.

    For pairs that share most words. The trainer of mopd needs no translation and is exact.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    student: str
    """Folder or hub id of the student's tokenizer."""
    student_fingerprint: str
    verdict: str
    """``fit``, ``partly fit`` or ``unfit``."""
    vocabulary: float
    """Share of the teacher's tokens that are one token of the student."""
    texts: dict[str, float]
    """Name of a sample text -> the same share among its tokens."""


class Manifest(BaseModel):
    """Identity of a teacher, returned by ``GET /v1/manifest``.

    ``manifest_id`` covers what affects scores: model, revision, engine, precision, vocabulary,
    tokenizer, template. The service's name and its limits may change without changing scores.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    service: str
    """Name given to this teacher at launch."""
    model: str
    """Model id or folder name."""
    revision: str
    """Hub commit, or a hash of the weights' index where there is none."""
    engine: str
    engine_version: str
    dtype: str
    """Precision of the forward pass."""
    logit_width: int = Field(gt=0)
    """Rows of the language-model head; may exceed ``tokenizer_size`` (padding is never scored)."""
    tokenizer_fingerprint: str
    tokenizer_size: int = Field(gt=0)
    roles: TokenRoles
    chat_template_hash: str | None
    max_model_len: int = Field(gt=0)
    """Longest prompt plus completion, in the teacher's tokens."""
    max_top_k: int = Field(gt=0)
    features: Features
    translation: TranslationFacts | None = None
    """Set for a service with a student; missing from the JSON without one."""

    @computed_field
    @property
    def manifest_id(self) -> str:
        """32 hex digits over everything that affects scores."""
        decisive = self.model_dump(
            mode="json",
            exclude={"service", "max_top_k", "max_model_len", "manifest_id", "translation"},
        )
        canonical = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @model_serializer(mode="wrap")
    def _without_missing_translation(self, serialize: SerializerFunctionWrapHandler) -> Any:
        fields: dict[str, Any] = serialize(self)
        if fields.get("translation") is None:
            fields.pop("translation", None)
        return fields

    @classmethod
    def parse(cls, body: dict[str, object]) -> "Manifest":
        """A manifest from its JSON form, which also carries the derived ``manifest_id``."""
        return cls.model_validate({k: v for k, v in body.items() if k != "manifest_id"})
