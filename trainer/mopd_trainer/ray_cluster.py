"""A run on a Ray cluster: student ranks and teacher services as actors, each on its own devices.

Ray chooses machines, starts processes there, and tells who has died; the ranks then train exactly
as those of ``torchrun`` do. The only file that imports ray.
"""

# ray is partly annotated, and need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from mopd_protocol.errors import ConfigError, MopdError
from mopd_trainer.config import RunConfig
from mopd_trainer.resources import ResourcesConfig, device_counts, placed_teachers
from mopd_trainer.teacher_config import TeacherConfig

logger = logging.getLogger(__name__)

#: What Ray calls a device of a kind.
_RESOURCE = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
#: Between the first rank that ends badly and the end of all.
_LAST_WORDS_SECONDS = 10.0
#: A service that does not run this long did not start.
_STARTED_SECONDS = 60.0
_STARTS = 5
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Ended:
    """How a student rank ended."""

    folder: Path | None = None  # of the finished student, by the first rank
    refusal: str | None = None  # one sentence; None where another rank tells it


def train_on_ray(config: RunConfig) -> Path:
    """Runs a distillation on the devices of ``config.resources``; the finished student's folder.

    Raises:
        MopdError: when the cluster has not what is asked for, when a rank is lost, and whatever a
            run raises.
    """
    resources = config.resources
    assert resources is not None
    with _cluster(resources, config.teachers) as place:
        groups = placed_teachers(config.teachers)
        services = [
            _service_actor(config, names, place(resources.student + number))
            for number, names in enumerate(groups.values())
        ]
        try:
            urls: dict[str, str] = {}
            for service in services:
                urls |= ray.get(service.start.remote())
            placed = _placed(config, urls)
            ranks = [
                ray.remote(_StudentRank).options(**place(rank)).remote()
                for rank in range(resources.student)
            ]
            return _trained(placed, ranks)
        finally:
            ray.wait([service.stop.remote() for service in services] or [ray.put(None)], timeout=30)


class _StudentRank:
    """One rank of the student, in a process of its own."""

    def __repr__(self) -> str:
        return "mopd"

    def meeting_place(self) -> tuple[str, int]:
        """Host and free port of this machine, for the ranks to find each other."""
        return get_node_ip_address(), _free_port()

    def process_id(self) -> int:
        """Of this rank."""
        return os.getpid()

    def train(self, config: RunConfig, rank: int, size: int, place: tuple[str, int]) -> Ended:
        """Leads the run or follows in it, to its end."""
        from mopd_trainer.following import follow
        from mopd_trainer.loop import train
        from mopd_trainer.ranks import joined_ranks

        # Ray shows each rank its own device and no other.
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR=place[0], MASTER_PORT=str(place[1]))
        try:
            with joined_ranks(config.student.device) as ranks:
                if rank == 0:
                    console = Console(width=160)
                    return Ended(asyncio.run(train(config, console, ranks=ranks)))
                follow(config.student, ranks)
                return Ended()
        except MopdError as error:
            return Ended(refusal=str(error))
        except BaseExceptionGroup as group:
            refusals, bugs = group.split(MopdError)
            if refusals is None or bugs is not None:
                raise
            return Ended(refusal=str(_first(refusals)))
        except SystemExit:
            return Ended(refusal="")


class _TeacherServices:
    """The teacher services of one group of devices, started again when they die."""

    def __init__(self, commands: Mapping[str, Sequence[str]], keys: Mapping[str, str]) -> None:
        self._commands = commands
        self._keys = keys
        self._host = "127.0.0.1"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = dict.fromkeys(commands, 0)
        self._stopping = threading.Event()

    def start(self) -> dict[str, str]:
        """Teacher name -> address, where it will answer when it has loaded its model, and again
        after it has been restarted."""
        self._host = get_node_ip_address()
        found: dict[str, str] = {}
        for name, command in self._commands.items():
            port = _free_port()
            arguments = [*command, "--name", name, "--host", self._host, "--port", str(port)]
            watch = threading.Thread(target=self._watch, args=(name, arguments), daemon=True)
            watch.start()
            found[name] = f"http://{self._host}:{port}"
        return found

    def process_ids(self) -> dict[str, int]:
        """Of the services that run now."""
        return {name: process.pid for name, process in self._running.items()}

    def starts(self) -> dict[str, int]:
        """How often each was started."""
        return dict(self._starts)

    def stop(self) -> None:
        """Ends them, within seconds."""
        self._stopping.set()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch(self, name: str, command: Sequence[str]) -> None:
        """Runs a service again and again, until it does not even start."""
        failures = 0
        while failures < _STARTS and not self._stopping.is_set():
            began = time.monotonic()
            environment = {**os.environ, "MOPD_API_KEYS": self._keys[name]}
            self._running[name] = subprocess.Popen(command, env=environment)
            self._starts[name] += 1
            code = self._running[name].wait()
            if self._stopping.is_set():
                return
            failures = failures + 1 if time.monotonic() - began < _STARTED_SECONDS else 1
            logger.warning("teacher %r ended with status %d; starting it again", name, code)
            self._stopping.wait(2.0 ** (failures - 1))
        logger.error("teacher %r does not start; given up after %d times", name, failures)


@contextmanager
def _cluster(resources: ResourcesConfig, teachers: Mapping[str, TeacherConfig]) -> Generator[Any]:
    """Connects, and reserves all devices at once; gives ``place``: part number -> actor options.

    Raises:
        ConfigError: when there is no cluster, or it has not what is asked for.
    """
    counts = device_counts(resources, teachers)
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
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = resources.address or "here"
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"resources: no Ray cluster at {where}: {reason}") from error
    try:
        extra = {} if resource == "CPU" else {"CPU": 1}
        group = placement_group([{resource: count, **extra} for count in counts], strategy="PACK")
        there = ray.cluster_resources().get(resource, 0)
        waiting = resources.wait_seconds if there >= sum(counts) else 0.0
        if not group.wait(timeout_seconds=waiting):
            raise ConfigError(
                f"resources: the run needs {sum(counts)} devices ({resource}: {counts} on one "
                f"machine each), but the cluster has {there:g}, of which "
                f"{ray.available_resources().get(resource, 0):g} are free"
            )

        def place(part: int) -> dict[str, Any]:
            count = counts[part]
            asked: dict[str, Any] = {"num_cpus": count if resource == "CPU" else 1}
            if resource == "GPU":
                asked["num_gpus"] = count
            if resource == "NPU":
                asked["resources"] = {resource: count}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=part)
            return {**asked, "scheduling_strategy": strategy}

        yield place
        remove_placement_group(group)
    finally:
        ray.shutdown()


def _service_actor(config: RunConfig, names: Sequence[str], options: Mapping[str, Any]) -> Any:
    commands: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for name in names:
        teacher = config.teachers[name]
        assert teacher.serve is not None
        executable = str(Path(sys.executable).parent / "mopd-teacher")
        commands[name] = [executable, "serve", teacher.serve.model, *teacher.serve.arguments]
        keys[name] = os.environ.get(teacher.api_key_env or "", "")
    # Its own methods and the wish to stop, while services are being watched.
    return ray.remote(_TeacherServices).options(**options).remote(commands, keys)


def _placed(config: RunConfig, urls: Mapping[str, str]) -> RunConfig:
    """The configuration with what is only known now: addresses, and the student's device."""
    assert config.resources is not None
    teachers = {
        name: teacher.model_copy(update={"url": (urls[name],)}) if name in urls else teacher
        for name, teacher in config.teachers.items()
    }
    student = config.student.model_copy(update={"device": config.resources.device})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _trained(config: RunConfig, ranks: Sequence[Any]) -> Path:
    """Waits for all ranks; ends all when one does not end well."""
    place = ray.get(ranks[0].meeting_place.remote())
    running = {
        actor.train.remote(config, rank, len(ranks), place): rank
        for rank, actor in enumerate(ranks)
    }
    ended: dict[int, Ended] = {}
    lost: dict[int, str] = {}
    pending = list(running)
    while pending and not lost and all(end.refusal is None for end in ended.values()):
        done, pending = ray.wait(pending, num_returns=1)
        _take(done, running, ended, lost)
    if pending:
        done, _ = ray.wait(pending, num_returns=len(pending), timeout=_LAST_WORDS_SECONDS)
        _take(done, running, ended, lost)
    for actor in ranks:
        ray.kill(actor)
    for rank, reason in lost.items():
        raise MopdError(
            f"student rank {rank} of {len(ranks)} died ({reason}); all ranks have been ended, and "
            "the last checkpoint is whole"
        )
    for end in ended.values():
        if end.refusal:
            raise MopdError(end.refusal)
    folder = ended[0].folder
    assert folder is not None
    return folder


def _take(
    done: Sequence[Any], running: Mapping[Any, int], ended: dict[int, Ended], lost: dict[int, str]
) -> None:
    for reference in done:
        rank = running[reference]
        try:
            ended[rank] = ray.get(reference)
        except RayTaskError:
            raise  # a bug, with its traceback
        except RayActorError as error:
            lost[rank] = " ".join(str(error).split())[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _first(group: BaseExceptionGroup[MopdError]) -> MopdError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
