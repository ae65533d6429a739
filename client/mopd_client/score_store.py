"""``ScoreStore``: scores on disk, found by what was asked, so that nothing is asked twice.

A resumed run, and a second loss on the same completions, then cost their teachers nothing. One
safetensors file a sequence, in the wire format, under a name that hashes everything that decides
the answer.
"""

import asyncio
import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

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
#: After files had to go, this share of the bound is in use, so that they do not go one by one.
_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class ScoreKey:
    """64 hex digits of a question: who was asked, about what, and how."""

    digest: str
    manifest_id: str

    @classmethod
    def of(
        cls, manifest_id: str, request: LogprobsRequest, sequence: SequenceRequest
    ) -> "ScoreKey":
        """The key of one sequence of a request; its ``id`` is a label and decides nothing."""
        question = {
            "schema_version": SCHEMA_VERSION,
            "manifest_id": manifest_id,
            "sequence": sequence.model_dump(mode="json", exclude={"id"}, exclude_none=True),
            "top_k": request.top_k,
            "temperature": request.temperature,
            "logprobs_dtype": request.logprobs_dtype,
        }
        canonical = json.dumps(question, sort_keys=True)  # ASCII: half characters have bytes too
        return cls(hashlib.sha256(canonical.encode()).hexdigest(), manifest_id)


class ScoreStore:
    """A folder of scores that holds at most ``max_bytes``; the least recently used go first.

    Several processes may share the folder: files are written whole or not at all.

    Raises:
        ConfigError: when the folder cannot be made, or the bound is not above 0.
    """

    def __init__(self, folder: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_bytes <= 0:
            raise ConfigError(f"the score cache may hold {max_bytes} bytes; expected more than 0")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"score cache {folder}: {error.strerror or error}") from error
        self.folder = folder
        self._max_bytes = max_bytes
        self._bytes = sum(size for _, size, _ in self._files())
        self._writing = threading.Lock()

    async def read(self, keys: Sequence[ScoreKey], counters: Counters) -> list[TeacherScore | None]:
        """The score of each key, None where it is not here; hits and misses are counted."""
        return await asyncio.to_thread(lambda: [self._load(key, counters) for key in keys])

    async def write(
        self,
        scores: Mapping[ScoreKey, TeacherScore],
        logprobs_dtype: LogprobsDtype,
        counters: Counters,
    ) -> None:
        """Keeps scores as they came off the wire, in the precision that was asked for.

        A disk that takes no more costs the run nothing but the cache: that is logged and counted.
        """
        await asyncio.to_thread(self._store, scores, logprobs_dtype, counters)

    def path_of(self, key: ScoreKey) -> Path:
        """Where a score lies; 256 folders, so that none holds millions of files."""
        return self.folder / key.digest[:2] / f"{key.digest}.safetensors"

    def _load(self, key: ScoreKey, counters: Counters) -> TeacherScore | None:
        path = self.path_of(key)
        try:
            score = _read(path.read_bytes(), key)
            os.utime(path)  # read just now, so among the last to go
        except FileNotFoundError:
            counters.cache_misses += 1
            return None
        except (DataError, OSError) as error:
            counters.cache_misses += 1
            counters.cache_corrupt += 1
            logger.warning("%s is not a score and will be replaced: %s", path, error)
            return None
        counters.cache_hits += 1
        return score

    def _store(
        self,
        scores: Mapping[ScoreKey, TeacherScore],
        logprobs_dtype: LogprobsDtype,
        counters: Counters,
    ) -> None:
        with self._writing:
            for key, score in scores.items():
                try:
                    self._write(self.path_of(key), _written(key, score, logprobs_dtype))
                except OSError as error:
                    counters.cache_unwritten += 1
                    logger.warning("score cache %s cannot be written: %s", self.folder, error)
            if self._bytes > self._max_bytes:
                self._make_room()

    def _write(self, path: Path, body: bytes) -> None:
        before = path.stat().st_size if path.exists() else 0
        with replacing(path) as temporary:
            temporary.write_bytes(body)
        self._bytes += len(body) - before

    def _make_room(self) -> None:
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)  # other processes write here, too
        kept_bytes = int(self._max_bytes * _KEPT_SHARE)
        for _, size, path in files:
            if self._bytes <= kept_bytes:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _files(self) -> list[tuple[int, int, Path]]:
        """(last use in nanoseconds, bytes, path) of every score."""
        found: list[tuple[int, int, Path]] = []
        for path in self.folder.glob("??/*.safetensors"):
            try:
                status = path.stat()
            except FileNotFoundError:  # another process made room
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        return found


def _written(key: ScoreKey, score: TeacherScore, logprobs_dtype: LogprobsDtype) -> bytes:
    """The file of one score: the wire format, and a hash of it beside it."""
    answer = LogprobsResponse(key.manifest_id, (None,), (score,))
    body = encode_binary(answer, logprobs_dtype)
    metadata, content = _parts(body)
    return save(
        load(body), metadata={**metadata, "key": key.digest, "sha256": _checksum(metadata, content)}
    )


def _read(body: bytes, key: ScoreKey) -> TeacherScore:
    """The score in a file.

    Raises:
        DataError: when the file is damaged, or belongs to another key.
    """
    metadata, content = _parts(body)
    if metadata.get("key") != key.digest:
        raise DataError(f"found key {str(metadata.get('key'))[:12]}, expected {key.digest[:12]}")
    if metadata.get("sha256") != _checksum(metadata, content):
        raise DataError("its content is not what was written")
    return decode_binary(body).scores[0]


def _parts(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The metadata of a safetensors file, and its tensors with their names, types and shapes."""
    try:
        (length,) = struct.unpack_from("<Q", body)
        header = json.loads(body[8 : 8 + length])
        metadata = header.pop("__metadata__")
        return metadata, json.dumps(header, sort_keys=True).encode() + body[8 + length :]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DataError(f"no safetensors file: {error!r}") from error


def _checksum(metadata: Mapping[str, Any], content: bytes) -> str:
    digest = hashlib.sha256(str(metadata.get("mopd")).encode())
    digest.update(content)
    return digest.hexdigest()
