"""``Ranks``: the processes that train one student, and the objects they exchange.

Every rank runs the same loop. Rank 0 samples, scores, and writes the journal and checkpoints; it
sends each rank its micro-batches, and all ranks make the same collective calls in the same order.

Objects travel over gloo and may take days, because rank 0 waits for teachers between two steps.
Activations and gradients use the device's own backend.
"""

import copyreg
import io
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mopd_protocol.errors import ConfigError, MopdError, RankError

logger = logging.getLogger(__name__)

#: Device type -> backend for its tensors.
_BACKENDS = {
    "cpu": "gloo",
    "cuda": "cpu:gloo,cuda:nccl",
    "npu": "cpu:gloo,npu:hccl",
    "xpu": "cpu:gloo,xpu:xccl",
}
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Longest wait of non-zero ranks between two steps.
_OBJECT_TIMEOUT = timedelta(days=7)
#: Keys of the store: number of failed ranks, message of the first.
_FAILURES, _FAILURE = "mopd/failures", "mopd/failure"


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _reduce_mapping(mapping: MappingProxyType[Any, Any]) -> tuple[Any, tuple[dict[Any, Any]]]:
    return _read_only, (dict(mapping),)


# Samples contain read-only mappings, which pickle does not support.
copyreg.pickle(MappingProxyType, _reduce_mapping)


class Ranks:
    """The rank of this process and the number of ranks; a single rank needs no process group."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device  # None: given by the student's settings
        self._store = store
        self._group: Any = None
        if size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_OBJECT_TIMEOUT)

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, and on a single rank."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks; the argument of non-zero ranks is ignored.

        Raises:
            RankError: when another rank is lost.
        """
        if self.size == 1:
            return value
        encoded = [_encode(value) if self.is_rank_zero else None]
        with self.report_lost_rank():
            dist.broadcast_object_list(encoded, src=0, group=self._group)
        return value if self.is_rank_zero else self._decode(encoded[0])

    def scatter(self, values: Sequence[Any] | None = None) -> Any:
        """Return this rank's element of rank 0's values.

        Args:
            values: one for each rank; ignored on non-zero ranks.

        Raises:
            RankError: when another rank is lost.
        """
        if self.is_rank_zero:
            assert values is not None
            if self.size == 1:
                return values[0]
        encoded = [_encode(value) for value in values or []] if self.is_rank_zero else None
        received: list[Any] = [None]
        with self.report_lost_rank():
            dist.scatter_object_list(received, encoded, src=0, group=self._group)
        return values[0] if self.is_rank_zero and values else self._decode(received[0])

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on rank 0; an empty list elsewhere.

        Raises:
            RankError: when another rank is lost.
        """
        if self.size == 1:
            return [value]
        encoded: list[Any] | None = [None] * self.size if self.is_rank_zero else None
        with self.report_lost_rank():
            dist.gather_object(_encode(value), encoded, dst=0, group=self._group)
        if encoded is None:
            return []
        return [value, *(self._decode(each) for each in encoded[1:])]

    @contextmanager
    def collective(self) -> Generator[None]:
        """Run tensor collectives after all ranks have arrived, however long rank 0 takes.

        Raises:
            RankError: when another rank is lost.
        """
        with self.report_lost_rank():
            if self.size > 1:
                dist.barrier(self._group)
            yield

    @contextmanager
    def report_lost_rank(self) -> Generator[None]:
        """Raise RankError in place of the backend's error when another rank is lost."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_connection_error(error):
                raise
            raise RankError(self._loss_message(error)) from error

    def leave(self, error: BaseException) -> None:
        """Record an error so that only the first failing rank reports it.

        Raises:
            RankError: on a non-zero rank that failed first.
            SystemExit: when another rank reports the error.
        """
        if isinstance(error, RankError):
            if self.rank > 0 or self._recorded_failure() is not None:
                raise SystemExit(1) from error
        elif isinstance(error, Exception):
            reason = str(error) if isinstance(error, MopdError) else repr(error)
            line = (reason.strip().splitlines() or [type(error).__name__])[0]
            message = f"student rank {self.rank} of {self.size} failed: {line}"
            logger.info(message, exc_info=error)
            if not self._record_failure(message):
                raise SystemExit(1) from error
            if self.rank > 0:
                raise RankError(message) from error

    def _decode(self, data: Any) -> Any:
        # Sent by another process of this run, so unpickling is as safe as this process's memory.
        return torch.load(io.BytesIO(data), map_location=self._own_device, weights_only=False)

    def _own_device(self, storage: Any, location: str) -> Any:
        """Move tensors of the sender's accelerator to this rank's; leave CPU tensors."""
        if location == "cpu" or self.device is None:
            return storage
        return torch.serialization.default_restore_location(storage, str(self.device))

    def _loss_message(self, error: Exception) -> str:
        line = (str(error).strip().splitlines() or ["no reason given"])[0]
        return self._recorded_failure() or (
            f"a student rank was lost ({line}); see its last log lines, and resume from the last "
            "checkpoint, which is complete"
        )

    def _record_failure(self, message: str) -> bool:
        """Store the message; False if another rank failed before."""
        try:
            if self._store is None or self._store.add(_FAILURES, 1) > 1:
                return False
            self._store.set(_FAILURE, message)
        except RuntimeError:  # rank 0, which runs the store, has exited
            return self.rank == 0
        return True

    def _recorded_failure(self) -> str | None:
        """Message of the first failing rank, if one has failed."""
        try:
            if self._store is not None and self._store.check([_FAILURE]):
                return self._store.get(_FAILURE).decode()
        except RuntimeError:
            return None
        return None


@contextmanager
def init_distributed(device: str) -> Generator[Ranks]:
    """Initialize the process group from ``torchrun``'s variables; a single rank without them.

    An error on one rank ends all ranks.

    Args:
        device: ``student.device``; a device type where there are several ranks.

    Raises:
        ConfigError: when the device does not exist, or is one device for several ranks.
        RankError: when this rank is non-zero and failed first.
        SystemExit: when another rank reports the error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    rank_device = _rank_device(device)
    if rank_device.type != "cpu":
        torch.accelerator.set_device_index(rank_device)
    store, rank, size = next(dist.rendezvous("env://"))
    backend = _BACKENDS.get(rank_device.type, "gloo")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size, rank_device, store)
    for variable in _RANK_VARIABLES:  # child processes are no ranks
        os.environ.pop(variable, None)
    try:
        yield ranks
        with ranks.collective():  # rank 0 runs the store and saves the student: it ends last
            pass
    except BaseException as error:
        ranks.leave(error)
        raise
    dist.destroy_process_group()


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _is_connection_error(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _rank_device(name: str) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        available = torch.accelerator.is_available()
        accelerator = torch.accelerator.current_accelerator() if available else None
        name = "cpu" if accelerator is None else accelerator.type
    if name == "cpu":
        return torch.device("cpu")
    if ":" in name:
        raise ConfigError(
            f"student.device: one device for several ranks (found {name!r}). Set it to "
            f"{name.partition(':')[0]!r}; each rank uses the device of its local rank.",
            key="student.device",
        )
    try:
        return torch.empty(0, device=f"{name}:{local}").device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"student.device: {name}:{local} of local rank {local} is not available (found "
            f"{name!r}): {reason}",
            key="student.device",
        ) from error
