"""``Expectation``: a run's requirements of a teacher, compared with the teacher's manifest."""

from collections.abc import Iterator
from dataclasses import dataclass

from mopd_protocol.errors import ConfigError, DataError, TeacherMismatchError
from mopd_protocol.manifest import Manifest

Difference = tuple[str, str]  # key, description


@dataclass(frozen=True)
class Expectation:
    """Requirements of a run; ``None`` accepts any value."""

    top_k: int = 1
    temperature: float = 1.0
    candidate_ids: bool = False
    messages: bool = False
    tokenizer_fingerprint: str | None = None  # of the tokenizer that a projection was built for
    manifest_id: str | None = None  # of the teacher that the run started with

    def check(self, teacher: str, manifest: Manifest) -> None:
        """Compare with a manifest; the error lists all differences and has the first's key.

        Raises:
            TeacherMismatchError: if it is not the teacher that the run's files were made with.
            ConfigError: if the teacher does not support a requirement.
        """
        differences = [*self._different_identity(manifest)]
        if differences:
            raise TeacherMismatchError(_message(teacher, differences), key=differences[0][0])
        unsupported = [*self._unsupported(manifest)]
        if unsupported:
            raise ConfigError(_message(teacher, unsupported), key=unsupported[0][0])

    def _different_identity(self, manifest: Manifest) -> Iterator[Difference]:
        fingerprint = manifest.tokenizer_fingerprint
        if self.tokenizer_fingerprint not in (None, fingerprint):
            yield (
                "tokenizer_fingerprint",
                f"tokenizer differs (found {fingerprint[:12]}, expected "
                f"{str(self.tokenizer_fingerprint)[:12]}). Rebuild the files made for the expected "
                "tokenizer, or serve its model",
            )
        if self.manifest_id not in (None, manifest.manifest_id):
            yield (
                "manifest_id",
                f"manifest differs (found {manifest.manifest_id[:12]}: {manifest.model} "
                f"{manifest.revision[:12]}, {manifest.engine} {manifest.engine_version}, "
                f"{manifest.dtype}; expected {str(self.manifest_id)[:12]}). Serve the model that "
                "the run started with, or start a new run",
            )

    def _unsupported(self, manifest: Manifest) -> Iterator[Difference]:
        features = manifest.features
        if self.top_k > manifest.max_top_k:
            yield (
                "top_k",
                f"top_k exceeds the service's limit (found at most {manifest.max_top_k}, expected "
                f"{self.top_k}). Lower top_k, or restart the service with a higher limit",
            )
        if self.temperature != 1.0 and not features.temperature:
            yield (
                "temperature",
                f"unsupported temperature (found 1 only, expected {self.temperature:g}). Set the "
                "teacher's temperature to 1, or use an engine that supports temperatures",
            )
        if self.candidate_ids and not features.candidate_ids:
            yield (
                "candidate_ids",
                "unsupported candidate_ids. Use the teacher's own top-k, or an engine that "
                "supports candidate_ids",
            )
        if self.messages and not features.messages:
            yield (
                "messages",
                "chat template not found, needed for messages. Send prompt or prompt_token_ids, "
                "or serve a model with a chat template",
            )


def changed_teacher(teacher: str, manifest_id: str, expected: Manifest) -> DataError:
    """Return the error of a response from another teacher than that of the handshake.

    Not a TeacherError: ``on_error: drop`` must not continue a run with another teacher.
    """
    return DataError(
        f"teacher {teacher!r} has changed since the handshake (found manifest {manifest_id[:12]}, "
        f"expected {summary(expected)}). Serve the same model again, or start a new run",
        key="manifest_id",
    )


def summary(manifest: Manifest) -> str:
    """Return the identity of a teacher for an error message."""
    return (
        f"{manifest.manifest_id[:12]} ({manifest.model} {manifest.revision[:12]}, "
        f"{manifest.engine} {manifest.engine_version}, {manifest.dtype})"
    )


def _message(teacher: str, differences: list[Difference]) -> str:
    return f"teacher {teacher!r}: " + "; ".join(description for _, description in differences)
