"""Limit of the memory of responses, each and all together, checked before scoring."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from mopd_server.service_error import ServiceError

#: Entries (id and logprob: 8 bytes in binary) of one response.
MAX_BINARY_ENTRIES = 32 * 2**20
#: An entry of JSON needs about a hundred bytes during encoding.
MAX_JSON_ENTRIES = 2 * 2**20
#: Entries of all responses in progress.
MAX_TOTAL_ENTRIES = 8 * MAX_BINARY_ENTRIES


@dataclass(frozen=True)
class ResponseForm:
    """Form of a response, and the fix of a too large one."""

    binary: bool
    fix: str = "Send fewer sequences per request, or request a smaller top_k."


BINARY = ResponseForm(binary=True)
JSON = ResponseForm(
    binary=False,
    fix="Send fewer sequences per request, or request a smaller top_k, or a binary response.",
)
#: JSON of a route without a binary form.
JSON_ONLY = ResponseForm(binary=False)


class ResponseLimit:
    """Counts the entries of all responses in progress."""

    def __init__(self) -> None:
        self._total = 0

    @contextmanager
    def reservation(self, form: ResponseForm) -> Generator[Callable[[int], None]]:
        """Yield a function that reserves the entries of one response until the block ends.

        The function raises ServiceError: 413 if the response is too large, 503 if others leave no
        room.
        """
        reserved = 0

        def reserve(entries: int) -> None:
            nonlocal reserved
            limit = MAX_BINARY_ENTRIES if form.binary else MAX_JSON_ENTRIES
            name = "in binary" if form.binary else "as JSON"
            if entries > limit:
                raise ServiceError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the response is too large (found {entries} entries, completion tokens times "
                    f"top_k, expected at most {limit} {name}). {form.fix}",
                )
            if self._total + entries > MAX_TOTAL_ENTRIES:
                raise ServiceError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"other responses fill this teacher's limit (found {self._total} entries in "
                    f"progress and {entries} requested, expected at most {MAX_TOTAL_ENTRIES}). "
                    "Retry later.",
                    code="responses",
                    retry_after_seconds=1,
                )
            self._total += entries
            reserved = entries

        try:
            yield reserve
        finally:
            self._total -= reserved
