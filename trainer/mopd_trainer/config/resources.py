"""``ResourcesConfig``: on which devices of a Ray cluster a run's parts stand."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mopd_trainer.config.teacher import TeacherConfig


class ResourcesConfig(BaseModel):
    """A run on Ray. Without it, a run is this process (or the ranks of ``torchrun``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = None
    """Of a running cluster (``auto``, or ``ray://host:10001``). Not set: one is started here, and
    ends with the run."""
    device: Literal["cuda", "npu", "cpu"] = "cuda"
    """What a device is; CPU cores for ``cpu``."""
    student: int = Field(default=1, ge=1)
    """Devices of the student: one rank each."""
    rollout_workers: int = Field(default=0, ge=0)
    """Workers that write completions, each with the whole student on devices of its own: one, or
    ``rollout.vllm.tensor_parallel_size`` with vLLM. 0: the first rank writes."""
    rollout_worker_restarts: int = Field(default=3, ge=0)
    """How often a worker that dies is started again. What it was writing is written again with the
    same seeds; a run ends when no worker is left."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long a cluster may take to have all devices free."""


def placed_teachers(teachers: Mapping[str, TeacherConfig]) -> dict[str, list[str]]:
    """Where teachers stand that the run starts itself: group -> names.

    Those that share devices are one group, whose devices are counted once.
    """
    groups: dict[str, list[str]] = {}
    for name, teacher in teachers.items():
        if teacher.serve is not None:
            groups.setdefault(teacher.serve.shares_with or name, []).append(name)
    return groups


def device_counts(
    resources: ResourcesConfig, teachers: Mapping[str, TeacherConfig], *, worker_devices: int = 1
) -> list[int]:
    """Devices of each part that is placed as one: every student rank, then every teacher group,
    then every rollout worker."""
    groups = placed_teachers(teachers)
    sizes = [
        max(served.devices for name in names if (served := teachers[name].serve) is not None)
        for names in groups.values()
    ]
    workers = [worker_devices] * resources.rollout_workers
    return [1] * resources.student + sizes + workers
