"""``ResourcesConfig``: devices of a Ray cluster for the parts of a run."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from mopd_trainer.config.settings import Settings, invalid
from mopd_trainer.config.teacher import TeacherConfig


class ResourcesConfig(Settings):
    """Resources of a run on Ray. Without this section, a run is a single process or the ranks of
    ``torchrun``."""

    address: str | None = None
    """Address of a running cluster (``auto``, or ``ray://host:10001``). Default: start a local
    cluster for the duration of the run."""
    device: Literal["cuda", "npu", "cpu"] = "cuda"
    """Type of a device; ``cpu`` counts cores."""
    student: int = Field(default=1, ge=1)
    """Devices of the student, one rank per device."""
    rollout_workers: int = Field(default=0, ge=0)
    """Workers that sample completions, each with a full copy of the student on separate devices:
    one, or ``rollout.vllm.tensor_parallel_size`` with vLLM. 0: rank 0 samples."""
    rollout_worker_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of a failed worker. Unfinished completions are sampled again with
    the same seeds; a run ends if no worker is left."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """Maximum time to wait until the cluster has enough free devices."""


def placed_teachers(teachers: Mapping[str, TeacherConfig]) -> dict[str, list[str]]:
    """Group the teachers that the run starts by shared devices.

    Returns:
        Group -> names of its teachers. The devices of a group are counted once.
    """
    groups: dict[str, list[str]] = {}
    for name, teacher in teachers.items():
        if teacher.serve is not None:
            groups.setdefault(teacher.serve.shares_with or name, []).append(name)
    return groups


def device_counts(
    resources: ResourcesConfig, teachers: Mapping[str, TeacherConfig], *, worker_devices: int = 1
) -> list[int]:
    """Return the number of devices of each placement: student ranks, teacher groups, workers."""
    groups = placed_teachers(teachers)
    sizes = [
        max(served.devices for name in names if (served := teachers[name].serve) is not None)
        for names in groups.values()
    ]
    workers = [worker_devices] * resources.rollout_workers
    return [1] * resources.student + sizes + workers


def require_valid_resources(
    resources: ResourcesConfig | None,
    teachers: Mapping[str, TeacherConfig],
    *,
    sharding: str,
    sampled: bool,
) -> None:
    """Check that every teacher and rank of a run has its devices.

    Args:
        sharding: ``student.sharding``.
        sampled: the student samples completions.

    Raises:
        ConfigError: for a teacher on Ray without resources, ranks without a strategy, or workers
            without work.
    """
    for name, teacher in teachers.items():
        if teacher.serve is None:
            continue
        if resources is None:
            raise invalid(
                f"teachers.{name}.placement",
                "'ray' needs a resources section. Add one, or use placement 'url'.",
            )
        other = teacher.serve.shares_with
        host = teachers[other].serve if other is not None and other in teachers else None
        if other is not None and (host is None or host.shares_with is not None):
            raise invalid(
                f"teachers.{name}.serve.shares_with",
                f"teacher {other!r} has no devices to share. Name a teacher with a serve "
                "section and without shares_with.",
            )
    ranks = 1 if resources is None else resources.student
    if ranks > 1 and sharding == "none":
        raise invalid(
            "student.sharding",
            f"several ranks need a strategy (found 'none' and resources.student {ranks}). Set "
            "it to 'ddp' or 'fsdp', or resources.student to 1.",
        )
    workers = 0 if resources is None else resources.rollout_workers
    if workers and not sampled:
        raise invalid(
            "resources.rollout_workers",
            f"this run samples no completions (found {workers}, expected 0). Remove the setting.",
        )
