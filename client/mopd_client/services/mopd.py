"""``MopdService``: a server started by ``mopd-teacher serve``."""

from pydantic import ValidationError

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.teacher import teacher_tokenizer
from mopd_client.transport.connection import Connection
from mopd_client.transport.replica import Replica
from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary
from mopd_protocol.errors import DataError, InvalidResponseError, TeacherMismatchError
from mopd_protocol.manifest import SCHEMA_VERSION, Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
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
        """See ``Service``; the server returns its manifest."""
        subject = f"teacher {connection.teacher!r} at {replica.url}"
        response = await connection.send_to_replica(
            replica, "/v1/manifest", deadline_seconds=deadline_seconds
        )
        status = response.status_code
        body = connection.json_object(connection.require_ok(response), kind=_KIND)
        if body.get("schema_version") != SCHEMA_VERSION:
            raise TeacherMismatchError(
                f"{subject}: unsupported schema version (found {body.get('schema_version')}, "
                f"expected {SCHEMA_VERSION}). Run the same mopd version on both sides",
                status=status,
                key="schema_version",
            )
        try:
            manifest = Manifest.parse(body)
        except ValidationError as error:
            raise InvalidResponseError(
                f"{subject}: invalid manifest: {error}", status=status, key="manifest"
            ) from error
        if body.get("manifest_id") != manifest.manifest_id:
            raise InvalidResponseError(
                f"{subject}: wrong manifest_id (found {body.get('manifest_id')}, expected the hash "
                f"{manifest.manifest_id}). Run the same mopd version on both sides",
                status=status,
                key="manifest_id",
            )
        return manifest

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """See ``Service``; the tokenizer is downloaded from the server."""
        body = connection.json_object(await connection.get("/v1/tokenizer"), kind=_KIND)
        try:
            text = body["files"]["tokenizer.json"]
        except (KeyError, TypeError) as error:
            raise InvalidResponseError(
                f"teacher {connection.teacher!r}: tokenizer.json not found in the response "
                "(expected under 'files')",
                key="files",
            ) from error
        return teacher_tokenizer(connection.teacher, manifest, text)

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``; one request for all sequences, a response in the binary format."""
        body = request.model_dump_json(exclude_none=True).encode()
        response = await connection.post(self.path, body, {"accept": BINARY_MEDIA_TYPE})
        try:
            return decode_binary(response.content)
        except DataError as error:
            raise InvalidResponseError(
                f"teacher {connection.teacher!r}: invalid response: {error}",
                status=response.status_code,
                key="body",
            ) from error
