"""``ScoringJob``: the data and teachers of ``mopd score``, as settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Source
from mopd_trainer.config.loading import load_run, parse_run
from mopd_trainer.config.run import DataConfig, RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.stored.folder import ScoreFolder

#: ``data.source`` of a run on reference completions.
_, REFERENCES = get_args(Source)
#: Name of the only teacher, if it is given without one.
ONLY_TEACHER = "teacher"


@dataclass(frozen=True)
class ScoringJob:
    """Data and teachers: the same settings as in a run that trains on the scores."""

    data: DataConfig
    teachers: Mapping[str, TeacherConfig]
    output: Path
    student: str | None = None
    """Model folder or hub name of the student whose tokens are sent; None for the data's texts."""

    @property
    def routes(self) -> tuple[str, ...]:
        """Teachers by which rows are routed; none if an unnamed teacher scores all rows."""
        return () if tuple(self.teachers) == (ONLY_TEACHER,) else tuple(self.teachers)

    @classmethod
    def of(
        cls,
        data: Path,
        output: Path,
        teachers: Sequence[str],
        overrides: Sequence[str] = (),
        *,
        student: str | None = None,
        **options: Any,
    ) -> "ScoringJob":
        """Read the arguments of the command line.

        Args:
            teachers: ``URL`` or ``NAME=URL``; a name that is repeated has several replicas.
            overrides: ``data.answer_key=solution``, as of ``mopd train``.
            options: settings of all teachers, for instance ``top_k``.

        Raises:
            ConfigError: for invalid settings.
        """
        urls: dict[str, list[str]] = {}
        for each in teachers:
            name, is_named, url = each.partition("=")
            if not is_named or "/" in name:  # "=" may be in the query of an address
                name, url = ONLY_TEACHER, each
            urls.setdefault(name, []).append(url)
        if len(urls) > 1 and ONLY_TEACHER in urls:
            raise ConfigError(
                f"teacher: several teachers need names (found {urls[ONLY_TEACHER][0]!r}, expected "
                "NAME=URL). Add the names that the data has.",
                key="teacher",
            )
        settings = {name: {"url": each, **options} for name, each in urls.items()}
        run = _run(data, output, settings, overrides)
        for name, teacher in run.teachers.items():
            if teacher.placement != "url" or teacher.support != "teacher_topk" or teacher.control:
                raise ConfigError(
                    f"teachers.{name}: only the top-k of a running service can be stored (found "
                    f"placement {teacher.placement!r}, support {teacher.support!r}, control "
                    f"{teacher.control!r}). Remove the setting.",
                    key=f"teachers.{name}",
                )
        return cls(run.data, run.teachers, output, student)

    @classmethod
    def stored(cls, data: Path, folder: ScoreFolder, overrides: Sequence[str] = ()) -> "ScoringJob":
        """Return the job that wrote a folder.

        Raises:
            ConfigError: for invalid settings.
        """
        settings = {
            name: {"scores": str(folder.folder), **each.options}
            for name, each in folder.teachers.items()
        }
        run = _run(data, folder.folder, settings, overrides)
        return cls(run.data, run.teachers, folder.folder)


def _run(
    data: Path, output: Path, teachers: Mapping[str, Any], overrides: Sequence[str]
) -> RunConfig:
    """Return settings of a run on reference answers; those of its student are not used."""
    values = {
        "output_dir": str(output),
        "max_steps": 1,
        "data": {"prompts": str(data), "source": REFERENCES},
        "student": {"model": "none"},
        "rollout": {"max_new_tokens": 1},
        "teachers": teachers,
    }
    return load_run(parse_run(values, source="mopd score"), overrides)
