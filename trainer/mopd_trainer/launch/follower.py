"""What a student rank does that does not run the loop: load its part, and follow."""

import signal
import threading
from typing import Any

from mopd_trainer.config.run import StudentConfig
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.interruption import SIGNALS
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.training.learner import Learner


def follow(config: StudentConfig, ranks: Ranks) -> None:
    """Trains with the others until the first rank is done.

    Ctrl-C, SIGTERM and SIGHUP reach all ranks, and are for the first: it finishes its step and
    saves.

    Raises:
        MopdError: when the student cannot be loaded, or another rank is gone.
    """
    if threading.current_thread() is threading.main_thread():
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
    student = Student.load(config, ranks)
    handlers = student.led()

    def begin(**known: Any) -> None:
        handlers.update(Learner(student, config, **known).led())

    def load(**known: Any) -> None:
        handlers.update(LocalTeachers(device=student.device, ranks=ranks, **known).led())

    handlers[Learner.BEGIN] = begin
    handlers[LocalTeachers.LOAD] = load
    ranks.follow(handlers)
