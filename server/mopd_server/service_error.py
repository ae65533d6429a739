"""``ServiceError``: a request that fails, with an HTTP status and a code."""

from http import HTTPStatus

from mopd_protocol.errors import TeacherError

#: nginx's status for a client that closed the connection; the standard has none.
CLIENT_CLOSED_REQUEST = 499

#: Codes of statuses that usually have one cause.
_CODES = {
    HTTPStatus.BAD_REQUEST: "malformed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
    HTTPStatus.UNPROCESSABLE_ENTITY: "unprocessable_entity",
    HTTPStatus.TOO_MANY_REQUESTS: "queue_full",
    CLIENT_CLOSED_REQUEST: "client_closed_request",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
    HTTPStatus.GATEWAY_TIMEOUT: "deadline",
}


def default_code(status: int) -> str:
    """Return the code of an error without a more specific one: ``malformed``, ``not_found``."""
    return _CODES.get(status) or HTTPStatus(status).phrase.lower().replace(" ", "_")


class ServiceError(TeacherError):
    """A request failed.

    ``code`` is also the ``reason`` in the metrics; ``key`` is the field of the request;
    ``retry_after_seconds`` is set where a retry may succeed (429 and 503).
    """

    status: int  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        key: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message, status=status, key=key)
        self.code = code or default_code(status)
        self.retry_after_seconds = retry_after_seconds


def invalid_field(field: str, problem: str, status: int = HTTPStatus.BAD_REQUEST) -> ServiceError:
    """Return the error of an invalid field of a request."""
    return ServiceError(status, f"{field}: {problem}", key=field)
