"""``Service``: requests and responses of one kind of teacher server."""

from typing import Protocol

from mopd_client.services.expectation import Expectation
from mopd_client.transport.connection import Connection
from mopd_client.transport.replica import Replica
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse


class Service(Protocol):
    """Interface of a kind of server."""

    @property
    def ready_path(self) -> str:
        """Path that returns 200 when the server is ready to score."""
        ...

    @property
    def path(self) -> str:
        """Path of scoring requests."""
        ...

    async def manifest(
        self,
        connection: Connection,
        replica: Replica,
        expectation: Expectation | None,
        *,
        deadline_seconds: float | None,
    ) -> Manifest:
        """Return the manifest of the server at one address.

        Raises:
            MopdError: if the server is unavailable or of another kind.
        """
        ...

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """Return the teacher's tokenizer.

        Raises:
            MopdError: if the tokenizer is unavailable or not the manifest's.
        """
        ...

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """Return the scores of a request, with the manifest id of the responding server.

        Raises:
            MopdError: if the server is unavailable, rejects the request, or returns an invalid
                response.
        """
        ...
