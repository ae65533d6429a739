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
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from mopd_protocol.errors import ConfigError, MopdError
from mopd_trainer.config.resources import device_counts, placed_teachers
from mopd_trainer.config.run import RunConfig

if TYPE_CHECKING:
    from mopd_trainer.rollouts.remote_sampler import Weights
    from mopd_trainer.student.student import Generation

logger = logging.getLogger(__name__)

#: What Ray calls a device of a kind.
_RESOURCE = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
#: Between the first rank that ends badly and the end of all.
_LAST_WORDS_SECONDS = 10.0
#: A service that does not run this long did not start.
_STARTED_SECONDS = 60.0
_STARTS = 5
#: Between two questions whether a worker is there again.
_RESTARTING_SECONDS = 0.5
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
    with _cluster(config) as place:
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
            first = resources.student + len(groups)
            workers = [
                worker_actor(placed, place(first + number))
                for number in range(resources.rollout_workers)
            ]
            ranks = [
                ray.remote(_StudentRank).options(**place(rank)).remote()
                for rank in range(resources.student)
            ]
            return _trained(placed, ranks, workers)
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

    def train(
        self,
        config: RunConfig,
        rank: int,
        size: int,
        place: tuple[str, int],
        workers: Sequence[Any],
    ) -> Ended:
        """Leads the run or follows in it, to its end."""
        from mopd_trainer.distributed.process_group import init_distributed
        from mopd_trainer.launch.follower import follow
        from mopd_trainer.loop import train

        # Ray shows each rank its own device and no other.
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR=place[0], MASTER_PORT=str(place[1]))
        try:
            with init_distributed(config.student.device) as ranks:
                if rank == 0:
                    console = Console(width=160)
                    writing = RayWorkers(workers, config) if workers else None
                    training = train(config, console, ranks=ranks, workers=writing)
                    return Ended(asyncio.run(training))
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


class _Worker:
    """A ``RolloutWorker`` in a process of its own. It takes seconds to be one, or minutes."""

    def __init__(self, config: RunConfig) -> None:
        from mopd_trainer.rollouts.worker import RolloutWorker

        self._refusal: MopdError | None = None
        try:
            self._worker = RolloutWorker(config)
        except MopdError as refusal:  # told when it is asked to write: Ray would restart it
            self._refusal = refusal

    def __repr__(self) -> str:
        return "mopd"

    async def process_id(self) -> int:
        """Of this worker, when it can write."""
        return os.getpid()

    async def write(
        self, prompts: Sequence[Sequence[int]], seed: int, version: int, weights: Sequence[Any]
    ) -> "list[Generation]":
        """See ``RolloutWorker``. ``weights`` is a list of a reference, as Ray would fetch a bare
        one also where it is not needed."""
        if self._refusal is not None:
            raise self._refusal

        async def fetched() -> "Weights":
            return await weights[0]

        return await self._worker.write(prompts, seed=seed, version=version, weights=fetched)


def worker_actor(config: RunConfig, options: Mapping[str, Any]) -> Any:
    """Starts a rollout worker, which Ray starts again when its process dies."""
    assert config.resources is not None
    vllm = config.rollout.engine == "vllm"
    at_once = config.rollout.vllm.max_num_seqs if vllm else 1
    policy = {"max_restarts": config.resources.rollout_worker_restarts, "max_task_retries": 0}
    # One more than it writes at once: to be asked whether it is there.
    return (
        ray.remote(_Worker).options(**options, **policy, max_concurrency=at_once + 1).remote(config)
    )


class RayWorkers:
    """``RolloutWorkers`` on a cluster. Weights are put into its object store once a push, and every
    machine fetches them from there once."""

    def __init__(self, actors: Sequence[Any], config: RunConfig) -> None:
        self._actors = actors
        self._lives = [0] * len(actors)  # how often each was started again
        self._left = set(range(len(actors)))
        vllm = config.rollout.engine == "vllm"
        slots = config.rollout.vllm.max_num_seqs if vllm else 1
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(slots):
            for worker in range(len(actors)):
                self._free.put_nowait(worker)
        self._weights: tuple[int, Any] | None = None
        self._restarts = 0
        self._ends: str | None = None
        self._reviving: dict[int, asyncio.Task[bool]] = {}

    async def push(self, version: int, weights: "Weights") -> None:
        """See ``RolloutWorkers``."""
        self._weights = (version, await asyncio.to_thread(ray.put, weights))

    async def write(
        self, prompts: Sequence[Sequence[int]], *, seed: int
    ) -> "tuple[list[Generation], int]":
        """See ``RolloutWorkers``."""
        begun: tuple[int, Any] | None = None
        while True:
            worker = await self._free.get()
            if self._ends is not None:
                self._free.put_nowait(worker)
                raise MopdError(self._ends)
            begun = begun or self._weights
            assert begun is not None  # pushed before anything is written
            version, reference = begun
            life = self._lives[worker]
            try:
                writing = self._actors[worker].write.remote(prompts, seed, version, [reference])
                found: list[Any] = await writing
            except RayTaskError as error:
                if isinstance(error.cause, MopdError):
                    raise MopdError(f"a rollout worker refuses: {error.cause}") from error
                raise  # a bug, with its traceback
            except asyncio.CancelledError:
                self._free.put_nowait(worker)
                raise
            except RayActorError as error:
                self._died(worker, life, error)
            else:
                self._free.put_nowait(worker)
                return found, version

    def take_restarts(self) -> int:
        """See ``RolloutWorkers``."""
        taken, self._restarts = self._restarts, 0
        return taken

    def _died(self, worker: int, life: int, error: Exception) -> None:
        """Tells it once, however many calls it meets; each slot is free again when the worker is
        there again."""
        if self._lives[worker] == life:
            self._lives[worker] += 1
            self._restarts += 1
            self._reviving[worker] = asyncio.create_task(self._revived(worker, error))

        def free_again(reviving: "asyncio.Task[bool]") -> None:
            if not reviving.cancelled() and reviving.result():
                self._free.put_nowait(worker)

        self._reviving[worker].add_done_callback(free_again)

    async def _revived(self, worker: int, error: Exception) -> bool:
        """Whether Ray started it again; when it was the last that did not, nobody waits on."""
        which = f"rollout worker {worker + 1} of {len(self._actors)}"
        logger.warning(
            "%s died (%s); it is started again, and what it was writing is written again with the "
            "same seeds",
            which,
            _in_a_line(error),
        )
        while True:
            try:
                await self._actors[worker].process_id.remote()
            except ActorUnavailableError:
                await asyncio.sleep(_RESTARTING_SECONDS)
            except RayActorError as gone:
                logger.warning("%s is not started again", which)
                self._left.discard(worker)
                if not self._left:
                    self._ends = (
                        f"no rollout worker is left: {which} died more often than "
                        f"resources.rollout_worker_restarts allows ({_in_a_line(gone)}); "
                        "resume_from_checkpoint=true goes on from the last checkpoint"
                    )
                    self._free.put_nowait(worker)
                return False
            else:
                return True


class _TeacherServices:
    """The teacher services of one group of devices, started again when they die."""

    def __init__(self, commands: Mapping[str, Sequence[str]], keys: Mapping[str, str]) -> None:
        self._commands = commands
        self._keys = keys
        self._host = "127.0.0.1"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = dict.fromkeys(commands, 0)
        self._stopping = threading.Event()
        self._starting = threading.Lock()  # nothing is started that nobody would end

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
        with self._starting:
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
        while failures < _STARTS:
            began = time.monotonic()
            environment = {**os.environ, "MOPD_API_KEYS": self._keys[name]}
            with self._starting:
                if self._stopping.is_set():
                    return
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
def _cluster(config: RunConfig) -> Generator[Any]:
    """Connects, and reserves all devices at once; gives ``place``: part number -> actor options.

    Raises:
        ConfigError: when there is no cluster, or it has not what is asked for.
    """
    resources = config.resources
    assert resources is not None
    vllm = config.rollout.engine == "vllm"
    devices = config.rollout.vllm.tensor_parallel_size if vllm else 1
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
            raise ConfigError(f"resources: Ray cannot be started here: {reason}") from error
        raise ConfigError(
            f"resources: no Ray cluster at {resources.address}: {reason}; start one there, and "
            "where it asks for a token, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here too"
        ) from error
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


def _trained(config: RunConfig, ranks: Sequence[Any], workers: Sequence[Any]) -> Path:
    """Waits for all ranks; ends all when one does not end well, and the workers in any case."""
    place = ray.get(ranks[0].meeting_place.remote())
    running = {
        actor.train.remote(config, rank, len(ranks), place, [] if rank else workers): rank
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
    for actor in [*ranks, *workers]:
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
            lost[rank] = _in_a_line(error)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _first(group: BaseExceptionGroup[MopdError]) -> MopdError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
