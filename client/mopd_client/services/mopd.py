"""``MopdService``: a server started by ``mopd-teacher serve``."""

import json
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

import httpx
from pydantic import ValidationError

from mopd_client.services.expectation import Expectation, changed_teacher
from mopd_client.tokenizers.teacher import teacher_tokenizer
from mopd_client.transport.balance import work_of
from mopd_client.transport.connection import Connection
from mopd_client.transport.outcome import problem_of
from mopd_client.transport.replica import Replica
from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary, decode_json
from mopd_protocol.errors import InvalidResponseError, TeacherMismatchError
from mopd_protocol.manifest import MANIFEST_HEADER, SCHEMA_VERSION, Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import REQUEST_HEADER, LogprobsRequest, body_hash
from mopd_protocol.responses import LogprobsResponse

_KIND = "mopd teacher"

#: Statuses that a teacher returns for a request that it has read.
_IDENTIFIED_STATUSES = frozenset({200, 400, 413, 422})


_DECODERS: dict[str, Callable[[bytes], LogprobsResponse]] = {
    BINARY_MEDIA_TYPE: decode_binary,
    "application/json": lambda content: decode_json(json.loads(content)),
}


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
            files = {str(name): str(content) for name, content in body["files"].items()}
            text = files.pop("tokenizer.json")
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidResponseError(
                f"teacher {connection.teacher!r}: tokenizer.json not found in the response "
                "(expected under 'files')",
                key="files",
            ) from error
        return teacher_tokenizer(connection.teacher, manifest, text, files)

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``; one request for all sequences.

        The response is binary; JSON, which a proxy may have made of it, is accepted too.
        """
        teacher = connection.teacher
        body = request.model_dump_json(exclude_none=True).encode()
        response = await connection.post(
            self.path,
            body,
            {"accept": BINARY_MEDIA_TYPE},
            work=work_of(request.sequences),
            check=lambda response: _require_manifest(teacher, response, manifest),
        )
        _require_request(teacher, response, body)
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in _DECODERS:
            raise InvalidResponseError(
                f"teacher {teacher!r} at {response.url}: wrong content type (found "
                f"{media_type or 'none'!r}, expected {' or '.join(_DECODERS)}): "
                f"{problem_of(response)}",
                status=response.status_code,
                key="content-type",
            )
        try:
            decoded = _DECODERS[media_type](response.content)
        except (ValueError, RecursionError) as error:  # DataError, or not JSON
            raise InvalidResponseError(
                f"teacher {teacher!r} at {response.url}: invalid response: {error}",
                status=response.status_code,
                key=getattr(error, "key", None) or "body",
            ) from error
        return replace(decoded, urls=(response.extensions["url"],) * len(decoded.scores))


def _require_manifest(teacher: str, response: httpx.Response, manifest: Manifest) -> None:
    """Check the identity of the responding teacher, also of one that rejects the request.

    Raises:
        DataError: if it is another teacher.
        InvalidResponseError: if a final response does not have the header: another server made it.
        RemoteProtocolError: if a 500 does not have it, which is retried: a proxy made it, whose
            replica has exited (Ray Serve).
    """
    manifest_id = response.headers.get(MANIFEST_HEADER)
    if manifest_id is not None and manifest_id != manifest.manifest_id:
        raise changed_teacher(teacher, manifest_id, manifest)
    if manifest_id is None and response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise httpx.RemoteProtocolError(
            f"status 500 without the header {MANIFEST_HEADER}, from a proxy: {problem_of(response)}"
        )
    if manifest_id is None and response.status_code in _IDENTIFIED_STATUSES:
        raise InvalidResponseError(
            f"teacher {teacher!r} at {response.url}: status {response.status_code} without the "
            f"header {MANIFEST_HEADER}: the response was made by another server, such as a proxy: "
            f"{problem_of(response)}",
            status=response.status_code,
            key=MANIFEST_HEADER,
        )


def _require_request(teacher: str, response: httpx.Response, body: bytes) -> None:
    """Check that the teacher scored the request as it was sent: the response has no prompts.

    Raises:
        InvalidResponseError: if the hash of the body is missing or differs.
    """
    expected, received = body_hash(body), response.headers.get(REQUEST_HEADER)
    if received != expected:
        raise InvalidResponseError(
            f"teacher {teacher!r} at {response.url}: the request was changed on its way (found "
            f"{REQUEST_HEADER} {received}, expected {expected}). Check that no proxy changes "
            "requests, and run the same mopd version on both sides",
            status=response.status_code,
            key=REQUEST_HEADER,
        )
