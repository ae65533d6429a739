"""Fitness of each teacher for scores in the student's ids, for other trainers."""

from collections.abc import Iterator, Mapping

from mopd_losses.translation.fitness import fitness
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.connect import Teacher


def check_translation(
    student: StudentIdentity, teachers: Mapping[str, Teacher]
) -> Iterator[Finding]:
    """Yield a finding per teacher with another tokenizer. This run does not need a translation."""
    for name, teacher in teachers.items():
        tokenizer = teacher.tokenizer
        if tokenizer.table.fingerprint == student.table.fingerprint:
            continue
        measured = fitness(student.table, tokenizer.encoder)
        numbers = {"vocabulary": measured.vocabulary, **measured.texts}
        text = f"teacher {name!r}: {measured.summary}. Only mopd-teacher --student translates."
        yield Finding("translation", "ok", text, numbers=numbers)
