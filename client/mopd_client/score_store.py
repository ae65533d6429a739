"""``ScoreStore``: teacher scores on disk in content-addressed shards, used as cache and recording.

A shard is a safetensors file in the wire format with the scores of one manifest. Its path is the
manifest id and the SHA-256 of the content, so that damage is detected and concurrent writers cannot
conflict. Its ids are ``ScoreKey`` digests: a score is found by everything that affects it.
"""

import asyncio
import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from mopd_client.transport.counters import Counters
from mopd_protocol.codec import decode_binary, encode_binary
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.manifest import SCHEMA_VERSION
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.samples import TeacherScore

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 64 * 2**30
#: Share of the limit in use after an eviction, so that not every write evicts.
_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class ScoreKey:
    """64 hex digits over everything that affects a score: teacher, sequence, options."""

    digest: str
    manifest_id: str

    @classmethod
    def of(
        cls, manifest_id: str, request: LogprobsRequest, sequence: SequenceRequest
    ) -> "ScoreKey":
        """Return the key of one sequence of a request; the sequence's ``id`` is not part of it."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "manifest_id": manifest_id,
            "sequence": sequence.model_dump(mode="json", exclude={"id"}, exclude_none=True),
            "top_k": request.top_k,
            "temperature": request.temperature,
            "logprobs_dtype": request.logprobs_dtype,
        }
        shown_tools = sequence.shown_tools
        if shown_tools is not None:
            fields["conversation"] = shown_tools
        canonical = json.dumps(fields, sort_keys=True)  # ASCII, so lone surrogates have bytes
        return cls(hashlib.sha256(canonical.encode()).hexdigest(), manifest_id)


@dataclass(frozen=True, eq=False)
class Shard:
    """Encoded scores of one manifest, ready to be saved."""

    name: str  # path relative to the store's folder
    body: bytes

    @classmethod
    def of(
        cls,
        manifest_id: str,
        keys: Sequence[str | None],
        scores: Sequence[TeacherScore],
        dtype: LogprobsDtype = "float32",
    ) -> "Shard":
        """Encode scores with one ``k``; with unequal ``k`` the rows would be padded."""
        body = encode_binary(LogprobsResponse(manifest_id, tuple(keys), tuple(scores)), dtype)
        return cls(f"{manifest_id}/{hashlib.sha256(body).hexdigest()}.safetensors", body)

    def save(self, folder: Path, *, durable: bool = False) -> Path:
        """Write the shard atomically; with ``durable`` it survives a power failure.

        Raises:
            OSError: if the disk is full or not writable.
        """
        path = folder / self.name
        with replacing(path, durable=durable) as temporary:
            temporary.write_bytes(self.body)
        return path


def load_shard(path: Path) -> LogprobsResponse:
    """Load and verify a shard.

    Raises:
        OSError: if the file cannot be opened.
        DataError: if the file is damaged.
    """
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()
    if digest != path.stem:
        raise DataError(
            f"{path} is damaged (found hash {digest[:12]}, expected {path.stem[:12]})",
            key=str(path),
        )
    return decode_binary(body)


class ScoreStore:
    """A cache of scores with at most ``max_bytes``; least recently used shards are evicted.

    Processes may share the folder: shards are written atomically.

    Raises:
        ConfigError: if the folder cannot be created, or the limit is not positive.
    """

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes <= 0:
            raise ConfigError(
                f"score cache: size limit is invalid (found {max_bytes} bytes, expected more than "
                "0)",
                key="score_cache.max_gigabytes",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"score cache {folder}: {error.strerror or error}", key="score_cache.path"
            ) from error
        self.folder = folder
        self._max_bytes = max_bytes
        self._index: dict[str, tuple[Path, int]] = {}  # key digest -> shard and row in it
        self._bytes: dict[Path, int] = {}  # size of every indexed shard
        self._ignored: set[Path] = set()  # unreadable, or no files
        self._scanned: dict[Path, int] = {}  # folder of a manifest -> its mtime when listed
        self._damaged = 0  # shards with a damaged header, to be counted by the next read
        self._lock = threading.Lock()

    async def read(self, keys: Sequence[ScoreKey], counters: Counters) -> list[TeacherScore | None]:
        """Return the score of each key, None if it is not stored; hits and misses are counted."""
        return await asyncio.to_thread(self._read, keys, counters)

    async def write(
        self,
        scores: Mapping[ScoreKey, TeacherScore],
        logprobs_dtype: LogprobsDtype,
        counters: Counters,
    ) -> None:
        """Store scores as received, in the requested precision.

        A disk error is logged and counted; the run continues without caching these scores.
        """
        await asyncio.to_thread(self._write, scores, logprobs_dtype, counters)

    def _read(self, keys: Sequence[ScoreKey], counters: Counters) -> list[TeacherScore | None]:
        with self._lock:
            positions = [self._find(key) for key in keys]
            counters.cache_corrupt, self._damaged = counters.cache_corrupt + self._damaged, 0
        shards: dict[Path, LogprobsResponse | None] = {}
        for path in {path for path, _ in positions if path is not None}:
            shards[path] = self._load(path, counters)
        scores: list[TeacherScore | None] = []
        for path, row in positions:
            shard = None if path is None else shards[path]
            scores.append(None if shard is None else shard.scores[row])
        misses = scores.count(None)
        counters.cache_misses += misses
        counters.cache_hits += len(scores) - misses
        return scores

    def _load(self, path: Path, counters: Counters) -> LogprobsResponse | None:
        try:
            shard = load_shard(path)
        except FileNotFoundError:  # evicted by another process
            pass
        except (DataError, OSError) as error:
            counters.cache_corrupt += 1
            self._discard(path, error)
        else:
            with suppress(OSError):  # of another user: the eviction sees an older use
                os.utime(path)  # most recently used
            return shard
        with self._lock:
            self._forget({path})
        return None

    def _discard(self, path: Path, error: Exception) -> None:
        """Remove a damaged shard; ignore one that this process cannot read or remove."""
        outcome = "it is ignored"
        if isinstance(error, DataError):
            try:
                path.unlink(missing_ok=True)
                outcome = "it is removed"
            except OSError as failure:
                outcome = f"it is ignored, because removing it failed: {failure.strerror}"
        if outcome != "it is removed":
            self._ignored.add(path)
        logger.warning("score cache: %s; %s", error, outcome)

    def _write(
        self,
        scores: Mapping[ScoreKey, TeacherScore],
        logprobs_dtype: LogprobsDtype,
        counters: Counters,
    ) -> None:
        groups: dict[tuple[str, int], list[ScoreKey]] = {}
        for key, score in scores.items():
            groups.setdefault((key.manifest_id, score.topk.k), []).append(key)
        with self._lock:
            for folder in self._entries(self.folder):
                self._scan(folder)
            for (manifest_id, _), keys in groups.items():
                digests = [key.digest for key in keys]
                shard = Shard.of(
                    manifest_id, digests, [scores[key] for key in keys], logprobs_dtype
                )
                try:
                    path = shard.save(self.folder)
                    self._scanned[path.parent] = path.parent.stat().st_mtime_ns
                except OSError as error:
                    counters.cache_unwritten += len(keys)
                    logger.warning("score cache %s: write failed: %s", self.folder, error)
                else:
                    self._add(path, digests, len(shard.body))
            if sum(self._bytes.values()) > self._max_bytes:
                self._evict()

    def _find(self, key: ScoreKey) -> tuple[Path, int] | tuple[None, int]:
        if key.digest not in self._index:
            self._scan(self.folder / key.manifest_id)
        return self._index.get(key.digest, (None, 0))

    def _scan(self, folder: Path) -> None:
        """Index the shards that other processes, or earlier runs, have written to a folder."""
        try:
            modified = folder.stat().st_mtime_ns
        except OSError:  # no score of this manifest is stored, or none is accessible
            return
        if self._scanned.get(folder) == modified:
            return
        self._scanned[folder] = modified
        for path in self._entries(folder):
            if path.suffix != ".safetensors" or path in self._bytes or path in self._ignored:
                continue
            try:
                self._add(path, _keys_of(path), path.stat().st_size)
            except FileNotFoundError:  # evicted by another process, or a broken link
                continue
            except (DataError, OSError) as error:
                self._damaged += 1
                self._discard(path, error)

    def _entries(self, folder: Path) -> list[Path]:
        """Return the contents of a folder; none if it is not readable or no folder."""
        try:
            return sorted(folder.iterdir())
        except NotADirectoryError:
            return []
        except OSError as error:
            if folder not in self._ignored:
                logger.warning("score cache: %s; it is ignored", error)
            self._ignored.add(folder)
            return []

    def _add(self, path: Path, digests: Sequence[str | None], size: int) -> None:
        self._bytes[path] = size
        self._index |= {
            digest: (path, row) for row, digest in enumerate(digests) if digest is not None
        }

    def _forget(self, paths: set[Path]) -> None:
        for path in paths:
            self._bytes.pop(path, None)
        self._index = {
            digest: position for digest, position in self._index.items() if position[0] not in paths
        }

    def _evict(self) -> None:
        """Remove the least recently used shards until ``_KEPT_SHARE`` of the limit is used."""
        last_use: dict[Path, int] = {}
        for path in self._bytes:
            try:
                last_use[path] = path.stat().st_mtime_ns
            except OSError:  # evicted by another process, or inaccessible
                last_use[path] = 0
        used, evicted = sum(self._bytes.values()), set[Path]()
        for path in sorted(last_use, key=lambda path: (last_use[path], path)):
            if used <= self._max_bytes * _KEPT_SHARE:
                break
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("score cache: %s; it is not evicted", error)
                self._ignored.add(path)
            used -= self._bytes[path]
            evicted.add(path)
        self._forget(evicted)


def _keys_of(path: Path) -> list[str | None]:
    """Read the keys in a shard's header.

    Raises:
        OSError: if the path is no file, or the file cannot be opened.
        DataError: if the header is damaged.
    """
    if not S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
        raise OSError(f"{path} is no file. Remove it")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        ids: list[str | None] = list(json.loads(header["__metadata__"]["mopd"])["ids"])
        hash(tuple(ids))  # a TypeError for other JSON than strings
        return ids
    except (struct.error, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error!r}", key=str(path)) from error
