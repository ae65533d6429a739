"""``evaluate_model``: the evaluation of a run for any model, without training."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from mopd_client.pool import ScoringClient
from mopd_client.teacher_client import TeacherClient
from mopd_client.transport.replica import ADDRESS_PREFIXES
from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.model_revision import is_missing_folder
from mopd_trainer.config.run import RunConfig, StudentConfig
from mopd_trainer.evaluation.models import EvaluatedModel, StudentModel
from mopd_trainer.evaluation.results import evaluate_set
from mopd_trainer.evaluation.sets import read_sets
from mopd_trainer.evaluation.teacher_model import TeacherModel
from mopd_trainer.metrics.step_metrics import Metrics
from mopd_trainer.rollouts.factory import open_source
from mopd_trainer.student.lora import ADAPTER_CONFIG
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import teacher_pool


async def evaluate_model(model: str, config: RunConfig) -> dict[str, Metrics]:
    """Evaluate a model on the sets of a run; return set -> metrics.

    Args:
        model: folder of a model, of a checkpoint or of adapters of ``student.model``; hub name;
            name of a teacher of the run; or address of a teacher service.

    Raises:
        MopdError: if the run has no evaluation, or the model or a set cannot be loaded.
    """
    if config.evaluation is None:
        raise ConfigError(
            "evaluation: not set, so that there is nothing to evaluate. Add sets to the run.",
            key="evaluation",
        )
    teachers = {model: config.teachers[model]} if model in config.teachers else {}
    sets = read_sets(config.evaluation, dict.fromkeys(config.evaluation.sets, teachers))
    async with _open(model, config) as evaluated:
        results = {
            each.name: await evaluate_set(evaluated, each, config.rollout, seed=config.seed)
            for each in sets
        }
    return {name: result.metrics() for name, result in results.items()}


@asynccontextmanager
async def _open(model: str, config: RunConfig) -> AsyncGenerator[EvaluatedModel]:
    if model in config.teachers:
        if config.teachers[model].local:
            raise ConfigError(
                f"teacher {model!r}: a 'local' teacher is evaluated during a run (found placement "
                "'local'). Set evaluation.teachers, or name its model folder.",
                key=f"teachers.{model}.placement",
            )
        async with teacher_pool({model: config.teachers[model]}) as pool:
            yield await _teacher(pool.client(model), config, model)
    elif model.startswith(ADDRESS_PREFIXES):
        async with TeacherClient(model, [model]) as client:
            yield await _teacher(client, config)
    else:
        _require_model(model, config)
        settings, adapters = _student(Path(model), config.student)
        # No second copy of the weights: nothing is trained meanwhile.
        rollout = config.rollout.model_copy(update={"max_staleness": 0})
        config = config.model_copy(update={"student": settings, "rollout": rollout})
        try:
            student = Student.load(settings)
        except ConfigError as error:
            if not Path(model).is_dir():
                error.add_note(_teachers_of(config))
            raise
        if adapters is not None:
            student.load_weights(adapters)
        async with open_source(config, student) as (_, generator):
            yield StudentModel(student, generator)


async def _teacher(
    client: ScoringClient, config: RunConfig, name: str | None = None
) -> TeacherModel:
    await client.wait_until_ready(config.teacher_wait_seconds)
    manifest = await client.handshake()
    table = (await client.tokenizer()).table
    variables = config.teachers[name].chat_template_kwargs if name is not None else None
    return TeacherModel(
        client,
        table,
        max_top_k=manifest.max_top_k,
        chat_template_kwargs=variables,
        name=name or "",
    )


def _require_model(model: str, config: RunConfig) -> None:
    """Check that a path is the folder of a model, before its name is looked up on the hub.

    Raises:
        ConfigError: if the folder is missing, or has no model.
    """
    folder = Path(model)
    if is_missing_folder(model):
        raise ConfigError(f"model {model!r}: folder not found. {_teachers_of(config)}", key="model")
    files = "config.json", ADAPTER_CONFIG, "state.json"
    if folder.is_dir() and not any((folder / name).is_file() for name in files):
        raise ConfigError(
            f"model {model!r}: the folder has no model (expected {', '.join(files[:2])} or a "
            "checkpoint). Name a folder in it, such as final.",
            key="model",
        )


def _teachers_of(config: RunConfig) -> str:
    names = ", ".join(config.teachers)
    return f"Name a folder, a model of the hub, an address, or a teacher of the run ({names})."


def _student(folder: Path, config: StudentConfig) -> tuple[StudentConfig, Path | None]:
    """Return the settings of a model, and the folder of its adapters if it has any."""
    weights = folder / "model" if (folder / "state.json").is_file() else folder
    if (weights / ADAPTER_CONFIG).is_file():
        return config, weights
    changes = {"model": str(weights), "revision": None, "lora": None, "sharding": "none"}
    return config.model_copy(update=changes), None
