"""Teacher service: top-k log-probabilities of completions over HTTP."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_server.app import create_app
    from mopd_server.scoring.service import TeacherService
    from mopd_server.settings import TeacherSettings
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "TeacherService",
    "TeacherSettings",
    "create_app",
]
