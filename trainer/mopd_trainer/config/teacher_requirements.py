"""Requirements of the teachers of a run: fallbacks, revisions, stored scores, local teachers."""

from collections.abc import Mapping

from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.config.settings import invalid
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.config.teacher import TeacherConfig


def require_valid_fallbacks(teachers: Mapping[str, TeacherConfig]) -> None:
    """Check that every fallback is a teacher of the run and that no chain has a cycle.

    Raises:
        ConfigError: for an unknown teacher or a cycle.
    """
    for name in teachers:
        chain = [name]
        while (following := teachers[chain[-1]].fallback) is not None:
            if following not in teachers:
                raise invalid(
                    f"teachers.{chain[-1]}.on_error",
                    f"unknown fallback teacher (found {following!r}, expected one of "
                    f"{', '.join(sorted(teachers))})",
                )
            if following in chain:
                raise invalid(
                    f"teachers.{name}.on_error",
                    f"cycle of fallbacks ({' -> '.join([*chain, following])}). End the chain with "
                    "fail, drop or wait.",
                )
            chain.append(following)


def require_revisions(teachers: Mapping[str, TeacherConfig]) -> None:
    """Check that the weights of every teacher can be identified, which a score cache needs.

    Raises:
        ConfigError: for a stock vLLM server without ``revision``.
    """
    for name, teacher in teachers.items():
        service = teacher.service
        if service and not service.describes_itself and teacher.revision is None:
            raise invalid(
                f"teachers.{name}.revision",
                f"required with score_cache, because a {service.title} does not identify its "
                "weights. Set a name for the weights.",
            )


def require_reference_answers(teachers: Mapping[str, TeacherConfig], rollout_share: float) -> None:
    """Check that stored scores are used for reference answers only.

    Raises:
        ConfigError: for a share of prompts that the student completes.
    """
    for name, teacher in teachers.items():
        if teacher.placement == "stored" and rollout_share > 0:
            raise invalid(
                f"teachers.{name}.placement",
                "'stored' has scores of reference answers, not of the student's samples (found an "
                f"on-policy fraction of {rollout_share:g}, expected 0). Set data.source to "
                "'answers', or use a running teacher.",
            )


def with_student(name: str, teacher: TeacherConfig, student: StudentConfig) -> TeacherConfig:
    """Return a self-teacher with the student's model, precision and variables of its template.

    Raises:
        ConfigError: for another model than the student's.
    """
    if teacher.kind != "self":
        return teacher
    if teacher.model not in (None, student.model):
        raise invalid(
            f"teachers.{name}.model",
            f"a teacher of kind 'self' has the student's (found {teacher.model!r}, expected "
            f"{student.model!r}). Remove it.",
        )
    return teacher.model_copy(
        update={
            "model": student.model,
            "revision": student.revision,
            "dtype": student.dtype,
            "chat_template_kwargs": teacher.chat_template_kwargs or student.chat_template_kwargs,
        }
    )


def require_valid_local_teachers(
    teachers: Mapping[str, TeacherConfig], rollout: RolloutConfig, *, recorded: bool, ranks: int
) -> None:
    """Check that local teachers score after sampling, before the update.

    Args:
        recorded: the run is recorded or replayed.
        ranks: of the student.

    Raises:
        ConfigError: for other settings of the rollout, a recording of full distributions, and a
            self-teacher of several ranks.
    """
    for name, teacher in teachers.items():
        if not teacher.local:
            continue
        if teacher.kind == "self":
            require_one_rank(name, ranks)
        if rollout.scoring != "after_rollout" or rollout.max_staleness:
            raise invalid(
                f"teachers.{name}.placement",
                "a 'local' teacher is offloaded during sampling and training (found "
                f"rollout.scoring '{rollout.scoring}' and rollout.max_staleness "
                f"{rollout.max_staleness}, expected 'after_rollout' and 0)",
            )
        if rollout.corrections:
            raise invalid(
                f"teachers.{name}.placement",
                "the student continues corrected completions after scoring, while a 'local' "
                f"teacher is loaded (found rollout.corrections {rollout.corrections}, expected "
                "0). Set it to 0, or serve the teacher with mopd-teacher.",
            )
        if teacher.support == "full" and recorded:
            raise invalid(
                f"teachers.{name}.support",
                "'full' cannot be recorded or replayed. Set it to 'teacher_topk', or remove "
                "logging.record and replay.",
            )


def require_one_rank(name: str, ranks: int) -> None:
    """Raise ConfigError for a self-teacher of several ranks, whose weights are not shared yet."""
    if ranks > 1:
        raise invalid(
            f"teachers.{name}.kind",
            f"'self' needs a student of one rank (found {ranks}). Use one rank, or serve a copy "
            "of the student with mopd-teacher.",
        )
