"""``ServiceError``: a request that this teacher does not answer, with the status that says why."""

from mopd_protocol.errors import TeacherError


class ServiceError(TeacherError):
    """A refused request: one sentence and an HTTP status.

    ``retry_after_seconds`` is given where asking again later may help (429 and 503). ``reason`` is
    the word under which it is counted on ``/metrics``; the status decides where it is absent.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        retry_after_seconds: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, status=status)
        self.http_status = status
        self.retry_after_seconds = retry_after_seconds
        self.reason = reason

    def about(self, place: str) -> "ServiceError":
        """The same refusal, saying which part of the request it is about."""
        return ServiceError(
            self.http_status,
            f"{place}: {self}",
            retry_after_seconds=self.retry_after_seconds,
            reason=self.reason,
        )
