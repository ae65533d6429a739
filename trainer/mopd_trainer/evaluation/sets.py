"""``EvaluationSet``: prompts, reference answers, sources and the grader of a set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt, Source
from mopd_trainer.config.data import DataConfig
from mopd_trainer.config.evaluation import EvaluationConfig, EvaluationSetConfig
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.evaluation.graders import Grade, grader_of

#: Keys of a line's data source if ``source_key`` is not set.
SOURCE_KEYS = ("data_source", "dataset", "tag")

_ROLLOUT, _REFERENCES = get_args(Source)


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """A set of ``evaluation.sets``, loaded."""

    name: str
    config: EvaluationSetConfig
    prompts: tuple[Prompt, ...]  # metadata: the line
    references: tuple[Any, ...]  # one per prompt; None for a user's function without answer_key
    grade: Grade | None
    """None for a set that measures the log-likelihood of its reference answers."""

    @classmethod
    def of(
        cls,
        name: str,
        config: EvaluationSetConfig,
        prompts: Sequence[Prompt],
        references: Sequence[Any],
    ) -> "EvaluationSet":
        """Build a set from prompts in memory; ``config.prompts`` is not read.

        Raises:
            ConfigError: if a user's grader cannot be imported.
        """
        likelihood = config.grader == "log_likelihood"
        grade = None if likelihood else grader_of(config, key=f"evaluation.sets.{name}")
        return cls(name, config, tuple(prompts), tuple(references), grade)

    @property
    def sources(self) -> list[str]:
        """Return the data source of each prompt; empty without one."""
        key = self.config.source_key
        keys = SOURCE_KEYS if key is None else (key,)
        lines = [prompt.metadata for prompt in self.prompts]
        return [str(next((line[k] for k in keys if line.get(k) is not None), "")) for line in lines]


def read_run_sets(config: RunConfig) -> list[EvaluationSet]:
    """Load the sets of a run with the prompts of the teachers that are evaluated on each.

    Raises:
        MopdError: as ``read_sets``.
    """
    sets = {} if config.evaluation is None else config.evaluation.sets
    teachers = {
        name: {each: config.teachers[each] for each in config.evaluated_teachers(name)}
        for name in sets
    }
    return read_sets(config.evaluation, teachers)


def read_sets(
    config: EvaluationConfig | None,
    teachers: Mapping[str, Mapping[str, TeacherConfig]] = MappingProxyType({}),
) -> list[EvaluationSet]:
    """Load the sets of an evaluation.

    Args:
        teachers: set -> teachers that are evaluated on it, whose own prompts its lines have.

    Raises:
        DataError: for a missing or empty file, and for an invalid line; ``key`` is the setting.
        ConfigError: if a user's grader cannot be imported.
    """
    sets: Mapping[str, EvaluationSetConfig] = {} if config is None else config.sets
    return [_read(name, each, teachers.get(name, {})) for name, each in sets.items()]


def _read(
    name: str, config: EvaluationSetConfig, teachers: Mapping[str, TeacherConfig]
) -> EvaluationSet:
    key = f"evaluation.sets.{name}"
    likelihood, function = config.grader == "log_likelihood", config.is_function
    data = DataConfig(
        prompts=config.prompts,
        split=config.split,
        subset=config.subset,
        question_key=config.question_key,
        ignored_keys=config.ignored_keys,
        source=_REFERENCES if config.answer_key is None and not function else _ROLLOUT,
    )
    try:
        prompts = read_prompts(data, (), unrouted=teachers, keep_rows=True, section=key)
    except DataError as error:
        raise DataError(f"{key}: {error}", key=error.key) from error
    prompts = prompts[: config.limit]
    references = [_reference(prompt, config, required=not function) for prompt in prompts]
    for prompt, reference in zip(prompts, references, strict=True):
        invalid = reference is None and not function
        if invalid or (likelihood and not (isinstance(reference, str) and reference)):
            raise DataError(
                f"{key}: {config.prompts}: prompt {prompt.index} has no reference answer (found "
                f"{reference!r} for {config.answer_key!r}). Set answer_key.",
                key=f"{key}.answer_key",
            )
    return EvaluationSet.of(name, config, prompts, references)


def _reference(prompt: Prompt, config: EvaluationSetConfig, *, required: bool) -> Any:
    if config.answer_key is not None:
        return prompt.metadata.get(config.answer_key)
    return prompt.answer if required else None
