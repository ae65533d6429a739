"""``MopdService``: a teacher that runs ``mopd-teacher serve``."""

from pydantic import ValidationError

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.teacher import TeacherTokenizer, teacher_tokenizer
from mopd_client.transport.connection import Connection
from mopd_client.transport.replica import Replica
from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import SCHEMA_VERSION, Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse

_KIND = "mopd teacher"


class MopdService:
    """See ``Service``."""

    ready_path = "/readyz"
    path = "/v1/logprobs"

    async def manifest(
        self,
        connection: Connection,
        replica: Replica,
        expectation: Expectation | None,
        *,
        deadline_seconds: float | None,
    ) -> Manifest:
        """See ``Service``; the service itself says who it is."""
        teacher = connection.teacher
        response = await connection.ask_replica(
            replica, "/v1/manifest", deadline_seconds=deadline_seconds
        )
        body = connection.document(connection.answered(response), kind=_KIND)
        if body.get("schema_version") != SCHEMA_VERSION:
            raise TeacherError(
                f"teacher {teacher!r} at {replica.url} speaks schema version "
                f"{body.get('schema_version')}, expected {SCHEMA_VERSION}; "
                "run the same mopd version on both sides",
                status=response.status_code,
            )
        try:
            manifest = Manifest.parse(body)
        except ValidationError as error:
            raise TeacherError(
                f"teacher {teacher!r} at {replica.url} sent no manifest: {error}",
                status=response.status_code,
            ) from error
        if body.get("manifest_id") != manifest.manifest_id:
            raise TeacherError(
                f"teacher {teacher!r} at {replica.url} calls its manifest "
                f"{body.get('manifest_id')}, but it hashes to {manifest.manifest_id}; "
                "run the same mopd version on both sides",
                status=response.status_code,
            )
        return manifest

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """See ``Service``; the tokenizer is fetched from the service."""
        body = connection.document(await connection.get("/v1/tokenizer"), kind=_KIND)
        try:
            text = body["files"]["tokenizer.json"]
        except (KeyError, TypeError) as error:
            raise TeacherError(
                f"teacher {connection.teacher!r} sent no tokenizer.json; expected it under 'files'"
            ) from error
        return teacher_tokenizer(connection.teacher, manifest, text)

    async def answer(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``; one question for all sequences, answered in the binary format."""
        body = request.model_dump_json(exclude_none=True).encode()
        response = await connection.question(self.path, body, {"accept": BINARY_MEDIA_TYPE})
        try:
            return decode_binary(response.content)
        except DataError as error:
            raise TeacherError(
                f"teacher {connection.teacher!r} answered nonsense: {error}",
                status=response.status_code,
            ) from error
