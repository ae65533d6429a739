"""Rollout workers in Ray actors, restarted after a crash."""

# ray has incomplete annotations, and need not be installed for type checking.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from mopd_protocol.errors import MopdError
from mopd_trainer.config.run import RolloutConfig, RunConfig
from mopd_trainer.rollouts.engine import worker_concurrency

if TYPE_CHECKING:
    from mopd_trainer.rollouts.remote_sampler import Weights
    from mopd_trainer.student.generation import Generation

logger = logging.getLogger(__name__)

#: Between two checks whether a worker has restarted.
_RESTART_POLL_SECONDS = 0.5


class _Worker:
    """A ``RolloutWorker`` in a separate process; loading takes seconds to minutes."""

    def __init__(self, config: RunConfig) -> None:
        from mopd_trainer.rollouts.worker import RolloutWorker

        self._error: MopdError | None = None
        try:
            self._worker = RolloutWorker(config)
        except MopdError as error:  # raised by generate(): Ray would restart the actor
            self._error = error

    def __repr__(self) -> str:
        return "mopd"

    async def process_id(self) -> int:
        """Return the process id, once the worker is loaded."""
        return os.getpid()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seed: int,
        version: int,
        weights: Sequence[Any],
        settings: RolloutConfig | None,
    ) -> "list[Generation]":
        """See ``RolloutWorker``.

        Args:
            weights: an object reference in a list, because Ray fetches bare references eagerly.
        """
        if self._error is not None:
            raise self._error

        async def fetch() -> "Weights":
            return await weights[0]

        return await self._worker.generate(
            prompts, seed=seed, version=version, weights=fetch, settings=settings
        )


def worker_actor(config: RunConfig, options: Mapping[str, Any]) -> Any:
    """Start a rollout worker, which Ray restarts when its process crashes."""
    assert config.resources is not None
    policy = {"max_restarts": config.resources.rollout_worker_restarts, "max_task_retries": 0}
    concurrency = worker_concurrency(config.rollout) + 1  # one more for process_id()
    actor = ray.remote(_Worker).options(**options, **policy, max_concurrency=concurrency)
    return actor.remote(config)


class RayWorkers:
    """``RolloutWorkers`` on a cluster.

    A push puts the weights into the object store once, from which each node fetches them once.
    """

    def __init__(self, actors: Sequence[Any], config: RunConfig) -> None:
        self._actors = actors
        self._lives = [0] * len(actors)  # restarts of each worker
        self._remaining = set(range(len(actors)))
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(worker_concurrency(config.rollout)):
            for worker in range(len(actors)):
                self._free.put_nowait(worker)
        self._weights: tuple[int, Any] | None = None
        self._restarts = 0
        self._failure: str | None = None
        self._restarting: dict[int, asyncio.Task[bool]] = {}

    async def push_weights(self, version: int, weights: "Weights") -> None:
        """See ``RolloutWorkers``."""
        self._weights = (version, await asyncio.to_thread(ray.put, weights))

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        settings: RolloutConfig | None = None,
    ) -> "tuple[list[Generation], int]":
        """See ``RolloutWorkers``."""
        weights: tuple[int, Any] | None = None
        while True:
            worker = await self._free.get()
            if self._failure is not None:
                self._free.put_nowait(worker)
                raise MopdError(self._failure)
            weights = weights or self._weights
            assert weights is not None  # pushed before the first call
            version, reference = weights
            life = self._lives[worker]
            try:
                generations: list[Any] = await self._actors[worker].generate.remote(
                    prompts, seed, version, [reference], settings
                )
            except RayTaskError as error:
                if isinstance(error.cause, MopdError):
                    raise MopdError(f"rollout worker failed: {error.cause}") from error
                raise  # a bug, with its traceback
            except asyncio.CancelledError:
                self._free.put_nowait(worker)
                raise
            except RayActorError as error:
                self._handle_crash(worker, life, error)
            else:
                self._free.put_nowait(worker)
                return generations, version

    def take_restarts(self) -> int:
        """See ``RolloutWorkers``."""
        restarts, self._restarts = self._restarts, 0
        return restarts

    def _handle_crash(self, worker: int, life: int, error: Exception) -> None:
        """Count a crash once, however many calls fail; free each call's slot after the restart."""
        if self._lives[worker] == life:
            self._lives[worker] += 1
            self._restarts += 1
            self._restarting[worker] = asyncio.create_task(self._wait_restart(worker, error))

        def free(restarting: "asyncio.Task[bool]") -> None:
            if not restarting.cancelled() and restarting.result():
                self._free.put_nowait(worker)

        self._restarting[worker].add_done_callback(free)

    async def _wait_restart(self, worker: int, error: Exception) -> bool:
        """Return True once Ray has restarted the worker; fail all calls if no worker is left."""
        name = f"rollout worker {worker + 1} of {len(self._actors)}"
        logger.warning(
            "%s crashed (%s); restarting it, and retrying its batches with the same seeds",
            name,
            one_line(error),
        )
        while True:
            try:
                await self._actors[worker].process_id.remote()
            except ActorUnavailableError:
                await asyncio.sleep(_RESTART_POLL_SECONDS)
            except RayActorError as final:
                logger.warning("%s is not restarted again", name)
                self._remaining.discard(worker)
                if not self._remaining:
                    self._failure = (
                        f"rollout workers: none is left: {name} crashed more often than "
                        f"resources.rollout_worker_restarts allows ({one_line(final)}). Resume "
                        "from the last checkpoint with resume_from_checkpoint=true."
                    )
                    self._free.put_nowait(worker)
                return False
            else:
                return True


def one_line(error: Exception) -> str:
    """Return the first 200 characters of a message, without line breaks."""
    return " ".join(str(error).split())[:200]
