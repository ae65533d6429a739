"""What a student rank does that does not run the loop: load its part, and follow."""

from typing import Any

from mopd_trainer.config import StudentConfig
from mopd_trainer.learner import Learner
from mopd_trainer.ranks import Ranks
from mopd_trainer.student import Student


def follow(config: StudentConfig, ranks: Ranks) -> None:
    """Trains with the others until the first rank is done.

    Raises:
        MopdError: when the student cannot be loaded, or another rank is gone.
    """
    student = Student.load(config, ranks)
    handlers = student.led()

    def begin(**known: Any) -> None:
        handlers.update(Learner(student, config, **known).led())

    handlers[Learner.BEGIN] = begin
    ranks.follow(handlers)
