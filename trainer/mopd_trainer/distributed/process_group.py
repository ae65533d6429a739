"""``Ranks``: the processes that train one student together, and how the first one leads them.

Rank 0 runs the loop: it samples, asks teachers, and writes the journal and checkpoints. The others
wait for what it wants done with the student. A method that all ranks must run begins with
``ranks.lead(name, ...)``: on rank 0 that tells the others to run it too, elsewhere it is nothing.

Words between ranks go over gloo, point to point, and may be long in coming; what the model and its
gradients need goes over the device's own backend.
"""

import copyreg
import io
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mopd_protocol.errors import ConfigError, MopdError, RankError

logger = logging.getLogger(__name__)

#: What moves tensors between devices of a kind.
_BACKENDS = {
    "cpu": "gloo",
    "cuda": "cpu:gloo,cuda:nccl",
    "npu": "cpu:gloo,npu:hccl",
    "xpu": "cpu:gloo,xpu:xccl",
}
_OF_THIS_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The leader may wait for its teachers for as long as that.
_BETWEEN_WORDS = timedelta(days=7)
_FAILURE, _FAILURES = "mopd/failure", "mopd/failures"
_END = "end"


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _pickled(mapping: MappingProxyType[Any, Any]) -> tuple[Any, tuple[dict[Any, Any]]]:
    return _read_only, (dict(mapping),)


# Samples hold read-only mappings, which pickle knows nothing of.
copyreg.pickle(MappingProxyType, _pickled)


class Ranks:
    """This process among those that train a student; one alone needs no ``torch.distributed``."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device  # None: the student's own settings decide
        self._store = store
        #: Held by a thread from a question to its answers, so that no other's come between.
        self.exchange = threading.RLock()
        self._words: Any = None
        if size > 1:
            self._words = dist.new_group(backend="gloo", timeout=_BETWEEN_WORDS)

    @property
    def leads(self) -> bool:
        """Whether there are others, and this is the one that they follow."""
        return self.size > 1 and self.rank == 0

    def lead(self, name: str, **arguments: Any) -> None:
        """Has the others run what they know under this name; nothing on a rank that follows.

        Raises:
            RankError: when another rank is gone.
        """
        if self.leads:
            self._tell([(name, (), arguments)] * self.size)

    def deal(self, name: str, parts: Sequence[Any], **arguments: Any) -> Any:
        """``lead``, with a first argument of its own for every rank; rank 0's is returned.

        Args:
            parts: one for each rank.
        """
        self._tell([(name, (part,), arguments) for part in parts])
        return parts[0]

    def follow(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Does what the leader wants until it wants no more.

        Raises:
            RankError: when the leader is gone.
        """
        while True:
            with self.together():
                name, own, arguments = self._receive(0)
            if name == _END:
                return
            handlers[name](*own, **arguments)

    def collect(self, value: Any) -> list[Any]:
        """On rank 0 the values of all ranks, in their order; elsewhere nothing."""
        with self.together():
            if self.rank > 0:
                self._send(value, 0)
                return []
            return [value, *(self._receive(rank) for rank in range(1, self.size))]

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        with self.together():
            if self.rank > 0:
                return self._receive(0)
            for rank in range(1, self.size):
                self._send(value, rank)
            return value

    @contextmanager
    def together(self) -> Generator[None]:
        """For what all ranks do at once: a peer that is lost meanwhile is told in one sentence.

        Raises:
            RankError: instead of what the backend says.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_loss(error):
                raise
            raise RankError(self._why_lost(error)) from error

    def leave(self, error: BaseException) -> None:
        """Ends with an error, which one rank tells: the first that failed.

        Raises:
            RankError: where it is this one, and not the leader.
            SystemExit: where another rank tells what happened.
        """
        if isinstance(error, RankError):
            if self.rank > 0 or self._noted() is not None:
                raise SystemExit(1) from error
        elif isinstance(error, Exception):
            reason = str(error) if isinstance(error, MopdError) else repr(error)
            line = (reason.strip().splitlines() or [type(error).__name__])[0]
            told = f"student rank {self.rank} of {self.size} failed: {line}"
            logger.info(told, exc_info=error)
            if not self._note(told):
                raise SystemExit(1) from error
            if self.rank > 0:
                raise RankError(told) from error

    def _tell(self, words: Sequence[Any]) -> None:
        with self.exchange, self.together():
            for rank in range(1, self.size):
                self._send(words[rank], rank)

    def _send(self, value: Any, to: int) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), to, group=self._words)
        dist.send(data, to, group=self._words)

    def _receive(self, source: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, group=self._words)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, source, group=self._words)
        # From another process of this run: as trustworthy as this one's own memory.
        received = io.BytesIO(data.numpy().tobytes())
        return torch.load(received, map_location=self._home, weights_only=False)

    def _home(self, storage: Any, location: str) -> Any:
        """Tensors of the leader's accelerator come to this rank's own; others stay where they
        are."""
        if location == "cpu" or self.device is None:
            return storage
        return torch.serialization.default_restore_location(storage, str(self.device))

    def _why_lost(self, error: Exception) -> str:
        line = (str(error).strip().splitlines() or ["no reason given"])[0]
        return self._noted() or (
            f"a student rank is gone ({line}); what it wrote last says why, and the last "
            "checkpoint is whole"
        )

    def _note(self, reason: str) -> bool:
        """Whether this rank is the first with a reason."""
        try:
            if self._store is None or self._store.add(_FAILURES, 1) > 1:
                return False
            self._store.set(_FAILURE, reason)
        except RuntimeError:  # the leader, which keeps the notes, has ended
            return self.rank == 0
        return True

    def _noted(self) -> str | None:
        """Why a rank failed, where one has said so."""
        try:
            if self._store is not None and self._store.check([_FAILURE]):
                return self._store.get(_FAILURE).decode()
        except RuntimeError:
            return None
        return None


@contextmanager
def init_distributed(device: str) -> Generator[Ranks]:
    """This process's ranks, by the variables that ``torchrun`` sets; one alone without them.

    However the block is left, the others end too.

    Args:
        device: ``student.device``, which must name a kind of device where there are several ranks.

    Raises:
        ConfigError: when there is no such device, or it is one for all.
        RankError: when this rank failed, and it is not the first.
        SystemExit: when another rank tells what happened.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    own = _own_device(device)
    if own.type != "cpu":
        torch.accelerator.set_device_index(own)
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        _BACKENDS.get(own.type, "gloo"), store=store, rank=rank, world_size=size
    )
    ranks = Ranks(rank, size, own, store)
    for variable in _OF_THIS_RANK:  # what this process starts is no rank
        os.environ.pop(variable, None)
    try:
        yield ranks
        ranks.lead(_END)
    except BaseException as error:
        ranks.leave(error)
        raise
    dist.destroy_process_group()


def _is_loss(error: RuntimeError) -> bool:
    """Whether it is about the connection to another rank and not about what was computed."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _own_device(name: str) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        name = "cpu" if found is None else found.type
    if name == "cpu":
        return torch.device("cpu")
    if ":" in name:
        raise ConfigError(
            f"student.device is {name!r}, one device for several ranks; set it to "
            f"{name.partition(':')[0]!r}, and each takes its own"
        )
    try:
        return torch.empty(0, device=f"{name}:{local}").device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"student.device is {name!r}, but there is no {name}:{local} for rank {local}: {reason}"
        ) from error
