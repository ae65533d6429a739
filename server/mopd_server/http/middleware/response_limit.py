"""Bounds what answers take in memory, one by one and all together, before they are computed."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus

from mopd_server.service_error import ServiceError

#: Entries (an id and its logprob: 8 bytes as binary) of one answer.
LARGEST_BINARY_ANSWER = 32 * 2**20
#: As JSON an entry takes some hundred bytes on the way.
LARGEST_JSON_ANSWER = 2 * 2**20
#: Entries of all answers that are under way.
HELD_ENTRIES = 8 * LARGEST_BINARY_ANSWER


class AnswerLimit:
    """Knows how many entries the answers under way will have."""

    def __init__(self) -> None:
        self._held = 0

    @contextmanager
    def share(self, *, binary: bool) -> Generator[Callable[[int], None]]:
        """Within the block, the function that this gives reserves entries for one answer.

        It raises ServiceError: 413 if the response is too large, 503 if others leave no room.
        """
        reserved = 0

        def reserve(entries: int) -> None:
            nonlocal reserved
            largest = LARGEST_BINARY_ANSWER if binary else LARGEST_JSON_ANSWER
            if entries > largest:
                raise ServiceError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the answer would have {entries} entries (completion tokens times top_k), "
                    f"expected at most {largest} {'in binary' if binary else 'as JSON'}; send "
                    "fewer sequences at once, or ask for a smaller top_k"
                    + ("" if binary else ", or for the binary answer"),
                )
            if self._held + entries > HELD_ENTRIES:
                raise ServiceError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{self._held} entries of other answers are under way and {entries} more would "
                    f"be above this teacher's {HELD_ENTRIES}; ask again later",
                    retry_after_seconds=1,
                    reason="answers",
                )
            self._held += entries
            reserved = entries

        try:
            yield reserve
        finally:
            self._held -= reserved
