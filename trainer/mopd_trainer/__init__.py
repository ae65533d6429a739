"""Trainer of mopd: on-policy distillation of a student from several teachers."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_trainer.api import check, report, train
    from mopd_trainer.config.loading import load_run
    from mopd_trainer.config.run import RunConfig
    from mopd_trainer.inspection.alignment import align
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "RunConfig": "config.run",
            "align": "inspection.alignment",
            "check": "api",
            "load_run": "config.loading",
            "report": "api",
            "train": "api",
        },
    )

__all__ = ["RunConfig", "align", "check", "load_run", "report", "train"]
