"""``check_run``: all checks of a run before its first step, without training."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.extras import require_packages
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import training_prompts
from mopd_trainer.diagnostics.examination import cheap_findings
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.diagnostics.resources import check_resources
from mopd_trainer.evaluation.graders import graders_of
from mopd_trainer.evaluation.sets import read_run_sets
from mopd_trainer.reporting.plan import describe_plan
from mopd_trainer.run_folder.recordings.replay import Replay
from mopd_trainer.run_folder.retention import starting_checkpoint
from mopd_trainer.student.devices import device_of
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.student.prompt_checks import check_prompts
from mopd_trainer.teachers.connect import connect_teachers, teacher_pool
from mopd_trainer.teachers.local.residency import teacher_device


async def check_run(
    config: RunConfig, console: Console, *, prompts: Sequence[Prompt] | None = None
) -> None:
    """Resolve a run, contact its teachers and print the plan; nothing is written to the run folder.

    Args:
        prompts: prompts of ``config.data``, if they are loaded already.

    Raises:
        MopdError: any error that would end the run before its first step.
    """
    prompts = training_prompts(config) if prompts is None else prompts
    require_packages(config)
    read_run_sets(config)
    graders_of(config.rewards)
    identity = RunIdentity.of(config, prompts)
    checkpoint = starting_checkpoint(config, identity)
    expected = checkpoint.manifest_ids if checkpoint else {}
    student = StudentIdentity.read(config.student)
    check_prompts(config, prompts, student)
    student.tokenizer_files.require_reloadable()
    if config.resources is None:  # else the devices are those of other machines
        device = device_of(config.student.device)
        for name, teacher in config.contacted_teachers.items():
            teacher_device(name, teacher, device)
    _report(check_resources(config, student), console)
    contacted = config.contacted_teachers
    with TemporaryDirectory() as folder:
        cache = ProjectionCache(Path(folder))
        async with teacher_pool(contacted, device=config.student.device) as pool:
            teachers = await connect_teachers(
                pool,
                contacted,
                student,
                cache,
                {} if config.accept_changed_teachers else expected,
                wait_seconds=config.teacher_wait_seconds,
                losses=checkpoint.losses if checkpoint else {},
            )
        replay = Replay.of(config, identity, prompts, student, cache)
        teachers = teachers if replay is None else replay.teachers
    console.print(describe_plan(config, prompts, student, teachers))
    _report(cheap_findings(config, prompts, student, teachers), console)


def _report(findings: Iterable[Finding], console: Console) -> None:
    """Print warnings; raise the first failed finding."""
    for finding in findings:
        if finding.status == "failed":
            raise ConfigError(f"{finding.check}: {finding.text} {finding.fix}", key=finding.check)
        if finding.status == "warning":
            console.print(finding.line(), markup=False, highlight=False, soft_wrap=True)
