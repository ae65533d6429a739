"""All checks of a run, cheap ones first; a failing request is a finding too."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack

from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.errors import MopdError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.diagnostics.case import Case, open_case
from mopd_trainer.diagnostics.ends import check_ends
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.diagnostics.identity import check_identity
from mopd_trainer.diagnostics.learnability import check_learnability
from mopd_trainer.diagnostics.own_text import check_own_text
from mopd_trainer.diagnostics.resources import check_resources
from mopd_trainer.diagnostics.self_distillation import (
    check_gradient,
    self_distillation,
    student_service,
)
from mopd_trainer.diagnostics.teachers import check_agreement, check_coverage, check_row_shift
from mopd_trainer.diagnostics.template_agreement import check_agreement_of_templates
from mopd_trainer.diagnostics.templates import check_templates, check_tokenizer
from mopd_trainer.diagnostics.translation import check_translation
from mopd_trainer.setup import teacher_loss
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import Teacher, connect_teachers, teacher_pool
from mopd_trainer.teachers.local.client import TeacherLock
from mopd_trainer.teachers.local.residency import LocalTeachers


def cheap_findings(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: StudentIdentity,
    teachers: dict[str, Teacher],
) -> Iterable[Finding]:
    """Yield the findings that need no weights."""
    yield from check_templates(prompts, student)
    yield from check_agreement_of_templates(prompts, student, teachers)
    yield from check_tokenizer(prompts, config.student, student)
    yield from check_identity(teachers)
    yield from check_translation(student, teachers)


async def examine(config: RunConfig, prompts: Sequence[Prompt]) -> AsyncIterator[Finding]:
    """Yield the findings of all checks as they are measured; nothing is written to the run folder.

    Raises:
        MopdError: when the student cannot be loaded.
    """
    config = without_controls(config)
    async with AsyncExitStack() as stack:
        url = stack.enter_context(student_service(config))
        student = await asyncio.to_thread(Student.load, config.student)
        lock, contacted = TeacherLock(), config.contacted_teachers
        pool = teacher_pool(contacted, lock=lock, device=config.student.device)
        await stack.enter_async_context(pool)
        cache = ProjectionCache()
        try:
            teachers = await connect_teachers(
                pool,
                contacted,
                student.identity,
                cache,
                {},
                wait_seconds=config.teacher_wait_seconds,
            )
        except (MopdError, BaseExceptionGroup) as error:
            yield _failure("identity", error)
            return
        local = LocalTeachers(
            {name: each for name, each in contacted.items() if each.local},
            {name: teacher.tokenizer.table for name, teacher in teachers.items()},
            device=student.device,
            tokens_per_batch=config.student.tokens_per_micro_batch,
            ranks=student.ranks,
            student=student,
        )
        lock.models = local
        for finding in check_resources(config, student.identity):
            yield finding
        for finding in cheap_findings(config, prompts, student.identity, teachers):
            yield finding
        losses = {n: teacher_loss(t, student, local, cache) for n, t in teachers.items()}
        for finding in check_ends(teachers, losses):
            yield finding
        try:
            case = await open_case(config, prompts, student, pool, teachers, losses)
        except (MopdError, BaseExceptionGroup) as error:
            yield _failure("scores", error)
            return
        async for finding in case_findings(case, url):
            yield finding


async def case_findings(case: Case, url: str | None) -> AsyncIterator[Finding]:
    """Yield the findings of the checks that need weights and scores.

    Args:
        url: service of the student's model; None without one.
    """
    try:
        async for finding in check_agreement(case):
            yield finding
        for checked in (check_coverage(case), check_row_shift(case), check_gradient(case)):
            for finding in checked:
                yield finding
        async for finding in check_own_text(case):
            yield finding
        async for finding in check_learnability(case):
            yield finding
        if url is not None:
            for finding in await self_distillation(case, url):
                yield finding
            return
    except (MopdError, BaseExceptionGroup) as error:
        yield _failure("scores", error)
        return
    text = "mopd-teacher not found, or it did not start; not measured."
    yield Finding("self-distillation", "warning", text, "Run pip install '.[server]'.")


def _failure(check: str, error: BaseException) -> Finding:
    """Return the first error as a finding; raise an error that is not of mopd."""
    while isinstance(error, BaseExceptionGroup):
        _, others = error.split(MopdError)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if others is not None:
            raise error  # pyright: ignore[reportUnknownArgumentType]
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Finding(check, "failed", str(error))


def without_controls(config: RunConfig) -> RunConfig:
    """Return the run with its teachers' actual scores, which the checks are about."""
    update = {"control": None}
    teachers = {n: each.model_copy(update=update) for n, each in config.teachers.items()}
    return config.model_copy(update={"teachers": teachers})
