"""Client of teacher services: top-k log-probabilities of completions over HTTP, without torch."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_client.pool import TeacherPool
    from mopd_client.score_store import ScoreStore
    from mopd_client.services.expectation import Expectation
    from mopd_client.sync import SyncTeacherClient
    from mopd_client.teacher_client import TeacherClient
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["Expectation", "ScoreStore", "SyncTeacherClient", "TeacherClient", "TeacherPool"]
