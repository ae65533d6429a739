"""``Expectation``: what a run needs of a teacher, compared with the teacher's manifest."""

from collections.abc import Iterator
from dataclasses import dataclass

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import Manifest


@dataclass(frozen=True)
class Expectation:
    """What a run needs. ``None`` means that anything will do."""

    top_k: int = 1
    temperature: float = 1.0
    candidate_ids: bool = False
    messages: bool = False
    tokenizer_fingerprint: str | None = None  # of the tokenizer a projection was built for
    manifest_id: str | None = None  # of the teacher that an earlier part of this run asked

    def check(self, teacher: str, manifest: Manifest) -> None:
        """Compares; says everything that is wrong at once.

        Raises:
            ConfigError: when the run asks for what this teacher cannot do.
            DataError: when it is another teacher than the one the run's files were made with.
        """
        wrong = [*self._different_identity(manifest)]
        if wrong:
            raise DataError(f"teacher {teacher!r} {'; and it '.join(wrong)}")
        missing = [*self._missing_ability(manifest)]
        if missing:
            raise ConfigError(f"teacher {teacher!r} {'; and it '.join(missing)}")

    def _different_identity(self, manifest: Manifest) -> Iterator[str]:
        found = manifest.tokenizer_fingerprint
        if self.tokenizer_fingerprint not in (None, found):
            yield (
                f"has tokenizer {found[:12]}, expected {str(self.tokenizer_fingerprint)[:12]}; "
                "rebuild what was made for the expected tokenizer, or serve the model it belongs to"
            )
        if self.manifest_id not in (None, manifest.manifest_id):
            yield (
                f"has manifest {manifest.manifest_id[:12]} ({manifest.model} "
                f"{manifest.revision[:12]}, {manifest.engine} {manifest.engine_version}, "
                f"{manifest.dtype}), expected {str(self.manifest_id)[:12]}; "
                "serve what this run began with, or begin another run"
            )

    def _missing_ability(self, manifest: Manifest) -> Iterator[str]:
        if self.top_k > manifest.max_top_k:
            yield (
                f"serves a top_k of at most {manifest.max_top_k}, expected {self.top_k}; "
                "lower top_k, or restart the service with a higher limit"
            )
        offered = manifest.features
        if self.temperature != 1.0 and not offered.temperature:
            yield (
                f"scores at temperature 1 only, expected {self.temperature:g}; set the teacher's "
                "temperature to 1, or serve it with an engine that has temperatures"
            )
        if self.candidate_ids and not offered.candidate_ids:
            yield (
                "cannot score candidate_ids, expected that it can; use its own top-k, or serve it "
                "with an engine that has candidate_ids"
            )
        if self.messages and not offered.messages:
            yield (
                "has no chat template for messages, expected one; send prompt or "
                "prompt_token_ids, or serve a model with a template"
            )
