"""Functions of the public API that run a whole command: ``train``, ``check``, ``evaluate``, ….

Heavy packages are imported inside the functions, so that invalid settings and data are reported
before torch is loaded.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mopd_protocol.errors import MissingPackageError

if TYPE_CHECKING:
    from mopd_protocol.samples import Prompt
    from mopd_trainer.config.run import RunConfig
    from mopd_trainer.diagnostics.finding import Finding

T = TypeVar("T")


def train(run: "str | Path | RunConfig", overrides: Sequence[str] = (), **settings: Any) -> Path:
    """Train the student of a run; blocks until the run is finished.

    Runs in this process, as a rank of ``torchrun``, or on Ray if the run has ``resources``.

    Args:
        run: YAML file, or settings.
        overrides: ``"teachers.math.top_k=32"``, dots for nesting.
        settings: overrides as keyword arguments (``max_steps=100``).

    Returns:
        The folder of the trained model, in the format of Hugging Face.

    Raises:
        MopdError: for invalid settings or data, unavailable teachers, a full disk or a failed step,
            possibly in an exception group; saved checkpoints stay complete.
        Interrupted: after SIGINT, SIGTERM or SIGHUP, with a checkpoint of the finished steps.
    """
    config, prompts = _load(run, overrides, settings)
    from mopd_trainer.reporting.console import make_console

    console = make_console()
    if config.resources is not None:
        from mopd_trainer.config.extras import RAY, require_package

        require_package(RAY)
        from mopd_trainer.launch.cluster import train_on_ray

        folder = train_on_ray(config)
    else:
        from mopd_trainer.distributed.process_group import init_distributed
        from mopd_trainer.loop import train as train_loop

        with init_distributed(config.student.device) as ranks:
            folder = _wait(train_loop(config, console, prompts=prompts, ranks=ranks))
        if not ranks.is_rank_zero:
            return folder
    console.print(f"saved the model to {folder}", markup=False, soft_wrap=True)
    return folder


def check(
    run: "str | Path | RunConfig", overrides: Sequence[str] = (), **settings: Any
) -> "RunConfig":
    """Validate a run without training: settings, data, packages, checkpoint, student and teachers.

    Prints the resolved plan. Arguments as ``train``.

    Returns:
        The validated settings.

    Raises:
        MopdError: any error that would end the run before its first step.
    """
    config, prompts = _load(run, overrides, settings)
    from mopd_trainer.launch.preflight import check_run
    from mopd_trainer.reporting.console import make_console

    console = make_console()
    _wait(check_run(config, console, prompts=prompts))
    console.print("configuration OK")
    return config


def evaluate(
    model: str | Path, run: "str | Path | RunConfig", overrides: Sequence[str] = (), **settings: Any
) -> dict[str, dict[str, float]]:
    """Evaluate a model on the sets of a run's ``evaluation``, without training.

    Args:
        model: folder of a model or checkpoint, hub name, name of a teacher of the run, or address
            of a teacher service.
        run: as in ``train``, also the following arguments.

    Returns:
        Set -> metric -> value, with the names of the journal after ``evaluation/<set>/``.

    Raises:
        MopdError: if the run has no evaluation, or the model or a set cannot be loaded.
    """
    config, _ = _load(run, overrides, settings)
    from mopd_trainer.evaluation.standalone import evaluate_model
    from mopd_trainer.reporting.console import make_console

    make_console()
    return _wait(evaluate_model(str(model), config))


def doctor(
    run: "str | Path | RunConfig",
    overrides: Sequence[str] = (),
    *,
    show: "Callable[[Finding], object] | None" = None,
    **settings: Any,
) -> "list[Finding]":
    """Check a run with its models and teachers, in about a minute; nothing is trained.

    Args:
        run: as in ``train``, also ``overrides`` and ``settings``.
        show: called with each finding as it is measured.

    Raises:
        MopdError: for invalid settings or data, and if the student cannot be loaded.
    """
    config, prompts = _load(run, overrides, settings)
    from mopd_trainer.diagnostics.examination import examine
    from mopd_trainer.reporting.console import make_console

    make_console()

    async def collect() -> "list[Finding]":
        findings: list[Finding] = []
        async for finding in examine(config, prompts):
            findings.append(finding)
            if show is not None:
                show(finding)
        return findings

    return _wait(collect())


def report(
    run_folder: str | Path,
    compared: str | Path | None = None,
    *,
    output: str | Path | None = None,
) -> Path:
    """Write the page of a finished or running run: curves, completions and teachers.

    Args:
        run_folder: ``output_dir`` of the run.
        compared: ``output_dir`` of a second run, side by side.
        output: default: ``report.html`` in ``run_folder``.

    Returns:
        The path of the page.

    Raises:
        ConfigError: if a folder has no journal.
        DiskError: if writing fails.
    """
    from mopd_trainer.pages.report import write_report

    return write_report(
        Path(run_folder),
        None if compared is None else Path(compared),
        None if output is None else Path(output),
    )


def serve_student(
    model: "str | Path",
    overrides: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8400,
    max_new_tokens: int = 512,
    announce: Callable[[str], None],
) -> None:
    """Serve a student to clients of the OpenAI API until SIGINT.

    Args:
        model: folder or hub name of a model, or a run's YAML file as a path.
        overrides: of the run.
        max_new_tokens: longest turn of a model without a run.
        announce: called with the base address.

    Raises:
        ConfigError: for invalid settings or a model that cannot be loaded, or if the address is not
            available.
    """
    require_trainer_extra()
    from mopd_trainer.config.loading import load_run
    from mopd_trainer.config.run import RolloutConfig, StudentConfig

    if isinstance(model, Path):
        config = load_run(model, overrides)
        student_config, rollout = config.student, config.rollout
    else:
        student_config, rollout = (
            StudentConfig(model=model),
            RolloutConfig(max_new_tokens=max_new_tokens),
        )
    from mopd_trainer.rollouts.agents import standalone
    from mopd_trainer.student.student import Student

    student = Student.load(student_config)
    serving = standalone.serve_student(student, rollout, host=host, port=port, announce=announce)
    with suppress(KeyboardInterrupt):
        _wait(serving)


def require_trainer_extra() -> None:
    """Raise MissingPackageError if packages of the extra ``trainer`` are not installed."""
    packages = ("jaxtyping", "omegaconf", "rich", "torch", "transformers")
    missing = [name for name in packages if not find_spec(name)]
    if missing:
        raise MissingPackageError(
            f"packages not found: {', '.join(missing)}. Run pip install '.[trainer]'.",
            key=missing[0],
        )


def _load(
    run: "str | Path | RunConfig", overrides: Sequence[str], settings: dict[str, Any]
) -> "tuple[RunConfig, list[Prompt]]":
    require_trainer_extra()
    from mopd_trainer.config.loading import load_run
    from mopd_trainer.data.prompts import training_prompts
    from mopd_trainer.evaluation.graders import graders_of
    from mopd_trainer.evaluation.sets import read_run_sets

    config = load_run(run, overrides, **settings)
    read_run_sets(config)
    graders_of(config.rewards)
    return config, training_prompts(config)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; in a notebook, whose thread has an event loop, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, work).result()
