"""``Service``: what a client must know of the kind of server that a teacher is."""

from typing import Protocol

from mopd_client.services.expectation import Expectation
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_client.transport.connection import Connection
from mopd_client.transport.replica import Replica
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse


class Service(Protocol):
    """How one kind of server is asked who it is and what it would have said."""

    @property
    def ready_path(self) -> str:
        """Answers 200 when the server is ready to score."""
        ...

    @property
    def path(self) -> str:
        """Where sequences are asked for; settled when a handshake is over."""
        ...

    async def manifest(
        self,
        connection: Connection,
        replica: Replica,
        expectation: Expectation | None,
        *,
        deadline_seconds: float | None,
    ) -> Manifest:
        """Who the server at one address is.

        Raises:
            MopdError: when it does not answer, or is no such server.
        """
        ...

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """The teacher's tokenizer.

        Raises:
            MopdError: when it is not to be had, or is not the manifest's.
        """
        ...

    async def answer(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """The scores that were asked for, under the manifest id of whoever answered.

        Raises:
            MopdError: when the server does not answer, refuses, or answers nonsense.
        """
        ...
