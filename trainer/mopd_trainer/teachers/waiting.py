"""``Waiting``: tells a person, now and then, that a run waits for an absent teacher."""

import logging

from mopd_client.transport.clock import Clock
from mopd_protocol.errors import TeacherError

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


class Waiting:
    """One teacher's absences; many requests may meet the same one."""

    def __init__(self, teacher: str, clock: Clock) -> None:
        self._teacher = teacher
        self._clock = clock
        self._since: float | None = None
        self._told_at = 0.0

    def go_on(self, error: TeacherError) -> None:
        """The teacher is not there (yet)."""
        now = self._clock.now()
        if self._since is not None and now - self._told_at < _SECONDS_BETWEEN_LINES:
            return
        self._since = now if self._since is None else self._since
        self._told_at = now
        logger.warning(
            "waiting for teacher %r, %.0f s so far: %s", self._teacher, now - self._since, error
        )

    def end(self) -> None:
        """The teacher answered."""
        if self._since is not None:
            seconds = self._clock.now() - self._since
            logger.warning("teacher %r is back after %.0f s", self._teacher, seconds)
        self._since = None
