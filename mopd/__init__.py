"""On-policy distillation from several teachers with any tokenizer, served over HTTP.

The names below are imported on first use; ``import mopd`` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mopd.scoring import score
    from mopd_client import SyncTeacherClient as TeacherClient
    from mopd_client import TeacherPool
    from mopd_losses import build_loss
    from mopd_trainer import align, check, evaluate, report, train
    from mopd_trainer import load_run as load_config

    __version__: str
else:
    _EXPORTS = {
        "TeacherClient": ("mopd_client", "SyncTeacherClient"),
        "TeacherPool": ("mopd_client", "TeacherPool"),
        "align": ("mopd_trainer", "align"),
        "build_loss": ("mopd_losses", "build_loss"),
        "check": ("mopd_trainer", "check"),
        "evaluate": ("mopd_trainer", "evaluate"),
        "load_config": ("mopd_trainer", "load_run"),
        "report": ("mopd_trainer", "report"),
        "score": ("mopd.scoring", "score"),
        "train": ("mopd_trainer", "train"),
    }

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value: object = import_module("importlib.metadata").version("mopd")
        elif name in _EXPORTS:
            module, attribute = _EXPORTS[name]
            value = getattr(import_module(module), attribute)
        else:
            raise AttributeError(f"module 'mopd' has no attribute {name!r}", name=name)
        globals()[name] = value
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
    "evaluate",
    "load_config",
    "report",
    "score",
    "train",
]
