"""``mopd-teacher`` with an engine that fails at a top-k of 13 and hangs at a top-k of 17.

Environment variables make it worse. LOADING_WAITS_FOR names a pipe: loading lasts until something
is written to it. ENGINE_WAITS_FOR does the same to a batch for 19 entries. With KILLED_ONCE, the
process kills itself in the middle of its fifth batch, as the kernel does when memory is short, and
leaves the file that it names; where that file is, it does not.
"""

import itertools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineCrashError, ScoringTask
from mopd_server.main import main
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings

load_teacher = TeacherService.load


def load(settings: TeacherSettings) -> TeacherService:
    """Load the service and replace its engine's scoring."""
    if gate := os.environ.get("LOADING_WAITS_FOR"):
        Path(gate).read_text()
    service = load_teacher(settings)
    engine: Any = service._engine
    score = engine.score
    batches = itertools.count()  # the first ones are the warm-up's

    def unlucky(
        batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        killed = Path(os.environ.get("KILLED_ONCE", os.devnull))
        if next(batches) == 5 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if top_k == 13:
            raise EngineCrashError("the accelerator fell off the bus at /opt/secret/driver.so")
        if top_k == 19:
            Path(os.environ["ENGINE_WAITS_FOR"]).read_text()
        if top_k == 17:
            threading.Event().wait()
        return score(batch, top_k=top_k, temperature=temperature)

    engine.score = unlucky
    return service


if __name__ == "__main__":
    TeacherService.load = load  # type: ignore[method-assign]
    sys.exit(main())
