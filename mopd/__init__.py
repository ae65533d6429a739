"""On-policy distillation from several teachers with any tokenizer, served over HTTP.

The names below are imported on first use; ``import mopd`` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd.scoring import score
    from mopd.translation import translate
    from mopd_client import SyncTeacherClient as TeacherClient
    from mopd_client import TeacherPool
    from mopd_losses import build_loss
    from mopd_trainer import align, check, doctor, evaluate, report, train
    from mopd_trainer import load_run as load_config

    __version__: str
else:
    _load_export, _ = lazy_exports(__name__)

    def __getattr__(name: str) -> object:
        if name != "__version__":
            return _load_export(name)
        globals()[name] = value = import_module("importlib.metadata").version("mopd")
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)


__all__ = [
    "TeacherClient",
    "TeacherPool",
    "__version__",
    "align",
    "build_loss",
    "check",
    "doctor",
    "evaluate",
    "load_config",
    "report",
    "score",
    "train",
    "translate",
]
