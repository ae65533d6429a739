"""``ScoreFolder``: the scores of a data set, in shards of a ``ScoreStore`` behind an index on disk.

``scores.json`` has the facts of the teachers; ``scores`` the shards, which a run can also use as
its ``score_cache``; ``index.sqlite`` the shard and row of every ``ScoreKey``. A shard is written
before its rows are indexed, and both are atomic: a killed process leaves at most shards without
rows, which the next one removes. The index stays on disk, so that a million scores need no memory.
"""

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mopd_client.score_store import ScoreKey, Shard, load_shard
from mopd_protocol.errors import CheckpointError, ConfigError
from mopd_protocol.requests import LogprobsDtype
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.runtime.atomic_file import remove_leftovers, replacing
from mopd_protocol.samples import TeacherScore
from mopd_trainer.teachers.stored.facts import TeacherFacts

FACTS = "scores.json"
SHARDS = "scores"
_INDEX = "index.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS scores (
    key BLOB PRIMARY KEY, shard INTEGER NOT NULL, row INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rejections (
    key BLOB PRIMARY KEY, status INTEGER NOT NULL, reason TEXT NOT NULL
) WITHOUT ROWID;
"""
#: Keys of one query.
_KEYS = 500
#: Shards in memory: rows of a step that follow each other in the data are often in one.
_LOADED = 4


@dataclass(frozen=True)
class Rejection:
    """A completion that a teacher does not score, because it is too long or invalid."""

    status: int  # of HTTP
    reason: str


Scores = dict[ScoreKey, TeacherScore]


@dataclass(frozen=True, eq=False)
class ScoredPart:
    """Scores of one teacher, in the order of the rows of a shard."""

    scores: Mapping[ScoreKey, TeacherScore | Rejection]
    dtype: LogprobsDtype = "float32"


class ScoreFolder:
    """Scores on disk, found by ``ScoreKey``; one process may write.

    Args:
        teachers: facts by name.
        student: fingerprint of the tokenizer that the completions were tokenized with, and whose
            lookaheads were scored; None if the texts of the data were sent.
        index: an open database.
    """

    def __init__(
        self,
        folder: Path,
        teachers: Mapping[str, TeacherFacts],
        student: str | None,
        index: sqlite3.Connection,
    ) -> None:
        self.folder = folder
        self.teachers = dict(teachers)
        self.student = student
        self._index = index
        self._lock = threading.Lock()  # a connection of SQLite is used by one thread at a time
        self._loaded: OrderedDict[str, LogprobsResponse] = OrderedDict()

    @classmethod
    def open(cls, folder: Path) -> "ScoreFolder":
        """Open a folder that ``mopd score`` wrote, for reading.

        Raises:
            CheckpointError: if it has no scores, or is damaged.
        """
        facts = _facts(folder)
        if facts is None:
            raise CheckpointError(
                f"{folder}: no scores found (found no {FACTS}). Write them with mopd score DATA "
                f"--teacher URL --output {folder}.",
                key=str(folder),
            )
        return cls(folder, *facts, _connect(folder, "ro"))

    @classmethod
    def create(
        cls, folder: Path, teachers: Mapping[str, TeacherFacts], student: str | None
    ) -> "ScoreFolder":
        """Create a folder, or open the one that an earlier process was writing.

        Raises:
            ConfigError: if that process had other teachers, options or another student.
            CheckpointError: if the folder is damaged.
        """
        facts = _facts(folder)
        if facts is None:
            plain = {name: each.plain() for name, each in teachers.items()}
            text = json.dumps({"teachers": plain, "student": student})
            with replacing(folder / FACTS, durable=True) as temporary:
                temporary.write_text(text)
        else:
            _require_same(folder, facts, teachers, student)
        index = _connect(folder, "rwc")
        index.executescript(_TABLES)
        opened = cls(folder, teachers, student, index)
        opened._remove_unindexed()
        return opened

    def facts(self, teacher: str) -> TeacherFacts:
        """Return the facts of a teacher; a folder with one teacher has them for any name.

        Raises:
            ConfigError: if there are several teachers and none has this name.
        """
        if teacher not in self.teachers and len(self.teachers) != 1:
            raise ConfigError(
                f"{self.folder}: no scores of teacher {teacher!r} (found "
                f"{', '.join(sorted(self.teachers))}). Name the teacher as mopd score did.",
                key=f"teachers.{teacher}.scores",
            )
        return self.teachers.get(teacher) or next(iter(self.teachers.values()))

    def stored(self, keys: Iterable[ScoreKey]) -> set[str]:
        """Return the digests of the keys that have a score, or were rejected by the teacher."""
        digests = [key.digest for key in keys]
        return {*self._positions(digests), *self._rejections(digests)}

    def read(self, keys: Sequence[ScoreKey]) -> list[TeacherScore | Rejection | None]:
        """Load the score of each key, or the reason why there is none; None if it is not stored.

        Raises:
            CheckpointError: if a shard is missing or damaged.
        """
        positions = self._positions([key.digest for key in keys])
        rejections = self._rejections([key.digest for key in keys])
        scores: list[TeacherScore | Rejection | None] = [rejections.get(key.digest) for key in keys]
        with self._lock:
            # By shard, so that each is loaded once.
            rows = [(positions[k.digest], at) for at, k in enumerate(keys) if k.digest in positions]
            for (name, row), at in sorted(rows):
                scores[at] = self._shard(name).scores[row]
        return scores

    def add(self, parts: Sequence[ScoredPart]) -> int:
        """Store scores of several teachers, all or none of them; return their number.

        Keys that are stored already are skipped.

        Raises:
            OSError: if the disk is full or not writable; earlier scores are complete.
        """
        shards: list[tuple[Shard, list[str]]] = []
        rejections: list[tuple[bytes, int, str]] = []
        for part in parts:
            stored = self.stored(part.scores)
            widths: dict[tuple[str, int], Scores] = {}
            for key, score in part.scores.items():
                if key.digest in stored:
                    continue
                if isinstance(score, TeacherScore):
                    widths.setdefault((key.manifest_id, score.topk.k), {})[key] = score
                else:
                    rejections.append((bytes.fromhex(key.digest), score.status, score.reason))
            for (manifest_id, _), scores in widths.items():
                digests = [key.digest for key in scores]
                shard = Shard.of(manifest_id, digests, [*scores.values()], part.dtype)
                shards.append((shard, digests))
        for shard, _ in shards:
            shard.save(self.folder / SHARDS, durable=True)
        with self._lock, self._index:
            self._index.executemany("INSERT INTO rejections VALUES (?, ?, ?)", rejections)
            for shard, digests in shards:
                number = self._index.execute(
                    "INSERT INTO shards (name) VALUES (?)", (shard.name,)
                ).lastrowid
                rows = ((bytes.fromhex(each), number, row) for row, each in enumerate(digests))
                self._index.executemany("INSERT INTO scores VALUES (?, ?, ?)", rows)
        return sum(len(digests) for _, digests in shards)

    def close(self) -> None:
        """Close the index, once no thread uses it."""
        with self._lock:
            self._index.close()

    def _positions(self, digests: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Return digest -> shard and row."""
        entries: dict[str, tuple[str, int]] = {}
        with self._lock:
            for start in range(0, len(digests), _KEYS):
                part = digests[start : start + _KEYS]
                marks = ",".join("?" * len(part))
                query = (
                    "SELECT key, name, row FROM scores JOIN shards ON shards.id = shard "
                    f"WHERE key IN ({marks})"
                )
                keys = [bytes.fromhex(each) for each in part]
                for key, name, row in self._index.execute(query, keys):
                    entries[key.hex()] = (name, row)
        return entries

    def _rejections(self, digests: Sequence[str]) -> dict[str, Rejection]:
        rejections: dict[str, Rejection] = {}
        with self._lock:
            if self._index.execute("SELECT 1 FROM rejections LIMIT 1").fetchone() is None:
                return {}
            for digest in digests:
                query = "SELECT status, reason FROM rejections WHERE key = ?"
                for row in self._index.execute(query, (bytes.fromhex(digest),)):
                    rejections[digest] = Rejection(*row)
        return rejections

    def _shard(self, name: str) -> LogprobsResponse:
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        path = self.folder / SHARDS / name
        try:
            shard = load_shard(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be loaded ({error}). Score again into an empty folder.",
                key=str(path),
            ) from error
        self._loaded[name] = shard
        if len(self._loaded) > _LOADED:
            self._loaded.popitem(last=False)
        return shard

    def _remove_unindexed(self) -> None:
        """Remove what a killed process wrote last, and check that all indexed shards exist."""
        folder = self.folder / SHARDS
        for each in folder.glob("*"):
            remove_leftovers(each)
        existing = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.safetensors")}
        for (name,) in self._index.execute("SELECT name FROM shards"):
            if name not in existing:
                raise CheckpointError(
                    f"{folder / name} is missing. Score again into an empty folder.",
                    key=str(folder / name),
                )
            existing.remove(name)
        for name in existing:
            (folder / name).unlink()


def _facts(folder: Path) -> tuple[dict[str, TeacherFacts], str | None] | None:
    """Read the facts of a folder; None if there are none."""
    path = folder / FACTS
    try:
        values = json.loads(path.read_text())
        teachers = {name: TeacherFacts.parse(each) for name, each in values["teachers"].items()}
        return teachers, values["student"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}", key=str(path)) from error


def _connect(folder: Path, mode: str) -> sqlite3.Connection:
    path = folder / _INDEX
    try:
        index = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, check_same_thread=False
        )
        index.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error}). Run mopd score again to complete the folder.",
            key=str(path),
        ) from error
    return index


def _require_same(
    folder: Path,
    facts: tuple[dict[str, TeacherFacts], str | None],
    teachers: Mapping[str, TeacherFacts],
    student: str | None,
) -> None:
    saved, saved_student = facts
    if saved.keys() != teachers.keys():
        raise ConfigError(
            f"{folder}: scores of other teachers (found {', '.join(sorted(saved))}, expected "
            f"{', '.join(sorted(teachers))}). Name the same teachers, or choose another folder.",
            key="teacher",
        )
    for name, each in teachers.items():
        saved[name].require_options(name, each.options, str(folder))
        if saved[name].manifest.manifest_id != each.manifest.manifest_id:
            raise ConfigError(
                f"{folder}: teacher {name!r} has changed (found manifest "
                f"{each.manifest.manifest_id[:12]}, expected "
                f"{saved[name].manifest.manifest_id[:12]}). Serve the same model, or choose "
                "another folder.",
                key="manifest_id",
            )
    if saved_student != student:
        raise ConfigError(
            f"{folder}: scored for another student (found tokenizer {(student or 'none')[:12]}, "
            f"expected {(saved_student or 'none')[:12]}). Choose another folder.",
            key="student",
        )
