"""A run on a Ray cluster: student ranks, rollout workers and teacher services as actors.

Ray chooses nodes, starts processes, and reports crashes; the ranks train as under ``torchrun``.
Only the modules of this folder import ray.
"""

# ray has incomplete annotations, and need not be installed for type checking.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mopd_protocol.errors import ConfigError, MopdError, RankError
from mopd_trainer.config.resources import device_counts, placed_teachers
from mopd_trainer.config.run import RunConfig
from mopd_trainer.launch.services import service_actor
from mopd_trainer.launch.student_rank import RankResult, StudentRank
from mopd_trainer.launch.workers import one_line, worker_actor
from mopd_trainer.rollouts.engine import worker_devices

#: Device type -> Ray resource.
_RESOURCE = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
#: Time for the remaining ranks to end after the first failure.
_SHUTDOWN_SECONDS = 10.0
_SERVICE_STOP_SECONDS = 30


def train_on_ray(config: RunConfig) -> Path:
    """Run a distillation on the devices of ``config.resources``; return the student's folder.

    Raises:
        MopdError: when the cluster lacks the devices, a rank is lost, or the run fails.
    """
    resources = config.resources
    assert resources is not None
    with _reserve(config) as options:
        groups = placed_teachers(config.teachers)
        services = [
            service_actor(config, names, options(resources.student + number))
            for number, names in enumerate(groups.values())
        ]
        try:
            urls: dict[str, str] = {}
            for service in services:
                urls |= ray.get(service.start.remote())
            placed = _with_addresses(config, urls)
            first = resources.student + len(groups)
            workers = [
                worker_actor(placed, options(first + number))
                for number in range(resources.rollout_workers)
            ]
            ranks = [
                ray.remote(StudentRank).options(**options(rank)).remote()
                for rank in range(resources.student)
            ]
            return _train(placed, ranks, workers)
        finally:
            stopping = [service.stop.remote() for service in services] or [ray.put(None)]
            ray.wait(stopping, timeout=_SERVICE_STOP_SECONDS)


@contextmanager
def _reserve(config: RunConfig) -> Generator[Any]:
    """Connect and reserve all devices; yield a function from part number to actor options.

    Raises:
        ConfigError: when there is no cluster, or the devices are not available.
    """
    resources = config.resources
    assert resources is not None
    devices = worker_devices(config.rollout)
    counts = device_counts(resources, config.teachers, worker_devices=devices)
    resource = _RESOURCE[resources.device]
    cores = sum(counts) if resource == "CPU" else None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=resources.address,
            num_cpus=cores if resources.address is None else None,
            include_dashboard=False if resources.address is None else None,
            logging_level=logging.WARNING,
        )
    except (OSError, ValueError, RuntimeError, RayError) as error:
        reason = str(error).strip().splitlines()[0]
        if resources.address is None:
            raise ConfigError(
                f"resources: Ray failed to start: {reason}", key="resources"
            ) from error
        raise ConfigError(
            f"resources.address: no Ray cluster at {resources.address}: {reason}. Start a cluster "
            "at this address; if it requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.",
            key="resources.address",
        ) from error
    try:
        extra = {} if resource == "CPU" else {"CPU": 1}
        group = placement_group([{resource: count, **extra} for count in counts], strategy="PACK")
        available = ray.cluster_resources().get(resource, 0)
        timeout = resources.wait_seconds if available >= sum(counts) else 0.0
        if not group.wait(timeout_seconds=timeout):
            raise ConfigError(
                f"resources: not enough devices (found {resource}: {available:g}, of which "
                f"{ray.available_resources().get(resource, 0):g} are free, expected "
                f"{sum(counts)}: {counts}, each on one node)",
                key="resources",
            )

        def options(part: int) -> dict[str, Any]:
            count = counts[part]
            demand: dict[str, Any] = {"num_cpus": count if resource == "CPU" else 1}
            if resource == "GPU":
                demand["num_gpus"] = count
            if resource == "NPU":
                demand["resources"] = {resource: count}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=part)
            return {**demand, "scheduling_strategy": strategy}

        yield options
        remove_placement_group(group)
    finally:
        ray.shutdown()


def _with_addresses(config: RunConfig, urls: Mapping[str, str]) -> RunConfig:
    """Add the addresses of the services and the student's device to the configuration."""
    assert config.resources is not None
    teachers = {
        name: teacher.model_copy(update={"url": (urls[name],)}) if name in urls else teacher
        for name, teacher in config.teachers.items()
    }
    student = config.student.model_copy(update={"device": config.resources.device})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _train(config: RunConfig, ranks: Sequence[Any], workers: Sequence[Any]) -> Path:
    """Wait for all ranks; end the others after a failure, and the workers in any case.

    Raises:
        MopdError: when a rank fails or crashes.
    """
    address = ray.get(ranks[0].address.remote())
    running = {
        actor.train.remote(config, rank, len(ranks), address, [] if rank else workers): rank
        for rank, actor in enumerate(ranks)
    }
    results: dict[int, RankResult] = {}
    crashed: dict[int, str] = {}
    pending = list(running)
    while pending and not crashed and all(each.error is None for each in results.values()):
        done, pending = ray.wait(pending, num_returns=1)
        _collect(done, running, results, crashed)
    if pending:
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=_SHUTDOWN_SECONDS)
        _collect(done, running, results, crashed)
    for actor in [*ranks, *workers]:
        ray.kill(actor)
    for rank, reason in crashed.items():
        raise RankError(
            f"student rank {rank} of {len(ranks)} crashed ({reason}); all ranks were stopped. "
            "Resume from the last checkpoint, which is complete."
        )
    for result in results.values():
        if result.error:
            raise MopdError(result.error)
    folder = results[0].folder
    assert folder is not None
    return folder


def _collect(
    done: Sequence[Any],
    running: Mapping[Any, int],
    results: dict[int, RankResult],
    crashed: dict[int, str],
) -> None:
    for reference in done:
        rank = running[reference]
        try:
            results[rank] = ray.get(reference)
        except RayTaskError:
            raise  # a bug, with its traceback
        except RayActorError as error:
            crashed[rank] = one_line(error)
