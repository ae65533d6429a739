"""Requests of a handshake with one replica of a stock vLLM server."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from mopd_client.transport.connection import Connection
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import ConfigError, InvalidResponseError

KIND = "vLLM server"


@dataclass(frozen=True)
class Handshake:
    """Requests of a handshake with one replica."""

    connection: Connection
    replica: Replica
    deadline_seconds: float | None

    @property
    def subject(self) -> str:
        """Subject of error messages."""
        return f"teacher {self.connection.teacher!r} at {self.replica.url}"

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path."""
        return self.document(
            await self.connection.send_to_replica(
                self.replica, path, deadline_seconds=self.deadline_seconds
            )
        )

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a POST of JSON and return the response, 200 or not."""
        return await self.connection.send_to_replica(
            self.replica, path, body=body, deadline_seconds=self.deadline_seconds
        )

    def document(self, response: httpx.Response) -> dict[str, Any]:
        """Return the JSON object of a successful response."""
        return self.connection.json_object(self.connection.require_ok(response), kind=KIND)


def model_card(teacher: str, models: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the server's entry of the model."""
    try:
        cards = {str(card["id"]): card for card in models["data"]}
        name = next(iter(cards)) if name is None and len(cards) == 1 else name
        if name in cards and int(cards[name]["max_model_len"]) > 1:
            return cards[name]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponseError(
            f"teacher {teacher!r}: max_model_len not found in the list of models ({error!r}). "
            f"Check that this address is a {KIND}",
            status=HTTPStatus.OK,
            key="max_model_len",
        ) from error
    expected = "one model, or a name" if name is None else repr(name)
    raise ConfigError(
        f"teacher {teacher!r}: model not found on the server (found "
        f"{', '.join(sorted(cards)) or 'none'}, expected {expected}). Set the teacher's model to a "
        "served name",
        key="model",
    )
