"""``score_dataset``: score the rows of a data set in blocks, each of which is stored at once.

A block has the next rows with a completion that is not scored yet, up to the size of one request.
Blocks are scored concurrently and stored in order. A resumed process therefore continues with the
block that a killed one had not stored, and writes the same shards. Memory does not depend on the
number of rows: the data is streamed, and what is scored is looked up on disk.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from mopd_client.pool import TeacherPool
from mopd_client.request_parts import LIMITS, size_of
from mopd_client.services.expectation import Expectation
from mopd_protocol.errors import DataError, DiskError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_trainer.dataset_scoring.capture import Captured, CapturingClient, captured
from mopd_trainer.dataset_scoring.requests import Row, read_rows
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.dataset_scoring.student_texts import (
    StudentLookaheads,
    StudentTexts,
    read_student,
)
from mopd_trainer.teachers.connect import teacher_pool
from mopd_trainer.teachers.stored.facts import TeacherFacts, request_options
from mopd_trainer.teachers.stored.folder import Rejection, ScoredPart, ScoreFolder

#: Rows whose keys are looked up together.
_LOOKED_UP = 256


@dataclass
class Progress:
    """Counts of a ``DatasetScorer`` so far."""

    rows: int = 0  # of the data, with those that were stored before
    scored: int = 0  # completions and lookaheads, each by one teacher
    repeated: int = 0  # rows whose completion was scored before, for them or another row
    too_long: int = 0  # completions that a teacher has no room for
    tokens: int = 0  # of the teachers


@dataclass(eq=False)
class _Block:
    """Rows with something to score, in the order of the data, and its size as one request."""

    rows: list[Row] = field(default_factory=list[Row])
    needed: list[set[str]] = field(default_factory=list[set[str]])  # teachers of each row
    size: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))

    def add(self, row: Row, needed: set[str], size: Mapping[str, int]) -> None:
        self.rows.append(row)
        self.needed.append(needed)
        self.size = {name: self.size[name] + size[name] for name in LIMITS}

    def has_room(self, size: Mapping[str, int]) -> bool:
        fits = all(self.size[name] + size[name] <= limit for name, limit in LIMITS.items())
        return not self.rows or fits

    @property
    def digests(self) -> set[str]:
        """Digests of what is scored."""
        rows = zip(self.rows, self.needed, strict=True)
        return {row.keys[name].digest for row, needed in rows for name in needed}


@asynccontextmanager
async def open_scorer(
    job: ScoringJob, *, concurrency: int, wait_seconds: float = 60.0
) -> AsyncGenerator["DatasetScorer"]:
    """Connect to the teachers of a job, and open its output folder.

    Raises:
        MopdError: if a teacher is unavailable or does not support the job, or the folder has
            scores of another teacher or with other options.
    """
    async with teacher_pool(job.teachers) as clients:
        await clients.wait_until_ready(wait_seconds)
        expected = {
            name: Expectation(
                top_k=teacher.top_k, temperature=teacher.scored_temperature, messages=True
            )
            for name, teacher in job.teachers.items()
        }
        manifests = await clients.handshake_all(expected)
        capturing = {
            name: CapturingClient(name, clients.client(name), manifest)
            for name, manifest in manifests.items()
        }
        pool = TeacherPool(capturing)
        tokenizers = {name: await clients.client(name).tokenizer() for name in job.teachers}
        facts = {
            name: TeacherFacts(
                manifests[name], tokenizers[name].tokenizer.to_str(), request_options(teacher)
            )
            for name, teacher in job.teachers.items()
        }
        student = lookaheads = fingerprint = None
        if job.student is not None:
            identity = read_student(job.student)
            encoders = {name: each.encoder for name, each in tokenizers.items()}
            student, fingerprint = StudentTexts(identity, encoders), identity.table.fingerprint
            lookaheads = await StudentLookaheads.connect(
                identity, job.teachers, pool, wait_seconds=wait_seconds
            )
        folder = ScoreFolder.create(job.output, facts, fingerprint)
        for client in capturing.values():
            client.folder = folder
        try:
            yield DatasetScorer(
                job,
                pool,
                manifests,
                folder,
                student=student,
                lookaheads=lookaheads,
                concurrency=concurrency,
            )
        finally:
            folder.close()


class DatasetScorer:
    """Scores all rows whose scores are not stored.

    Args:
        concurrency: blocks that are scored at once.
    """

    def __init__(
        self,
        job: ScoringJob,
        pool: TeacherPool,
        manifests: Mapping[str, Manifest],
        folder: ScoreFolder,
        *,
        student: StudentTexts | None = None,
        lookaheads: StudentLookaheads | None = None,
        concurrency: int = 8,
    ) -> None:
        self._job = job
        self._pool = pool
        self._manifests = manifests
        self._folder = folder
        self._student = student
        self._lookaheads = lookaheads
        self._concurrency = concurrency
        self.progress = Progress()
        self._waiting: deque[tuple[_Block, asyncio.Task[Captured]]] = deque()
        self._pending: set[str] = set()  # digests of blocks that are not stored
        self._read = 0  # rows
        self._stored: set[str] = set()  # of blocks that were stored after the last look-up

    async def run(self, show: Callable[[Progress], object] = lambda progress: None) -> Progress:
        """Score and store.

        Args:
            show: called after each block is stored, and while rows are skipped.

        Raises:
            TeacherError: if a teacher fails.
            DataError: for an invalid row, or one that a teacher rejects; ``key`` is ``file:row``.
            DiskError: if the disk is full; what was stored before is complete.
        """
        block = _Block()
        async with asyncio.TaskGroup() as group:

            async def start(block: _Block) -> None:
                self._waiting.append((block, group.create_task(self._score(block))))
                if len(self._waiting) >= self._concurrency:
                    await self._store_first(show)

            for row, needed in self._new_rows(show):
                size = self._size(row)
                if not block.has_room(size):
                    full, block = block, _Block()
                    await start(full)
                block.add(row, needed, size)
            if block.rows:
                await start(block)
            while self._waiting:
                await self._store_first(show)
        self.progress.rows = self._read
        show(self.progress)
        return self.progress

    def _new_rows(self, show: Callable[[Progress], object]) -> Iterator[tuple[Row, set[str]]]:
        """Yield rows with the teachers whose score of it is neither stored nor on its way."""
        for rows in _parts(read_rows(self._job, self._manifests, self._student)):
            self._pending -= self._stored
            self._stored.clear()
            known = self._folder.stored([key for row in rows for key in row.keys.values()])
            for row in rows:
                self._read = row.number
                if not self._pending:
                    self.progress.rows = row.number
                new = {
                    name
                    for name, key in row.keys.items()
                    if key.digest not in known and key.digest not in self._pending
                }
                if new:
                    self._pending.update(row.keys[name].digest for name in new)
                    yield row, new
                else:
                    self.progress.repeated += 1
            if not self._pending:
                show(self.progress)

    async def _score(self, block: _Block) -> Captured:
        """Return the scores of a block by teacher; equal sequences are sent once."""
        scores: Captured = {name: {} for name in self._job.teachers}
        captured.set(scores)  # of this task
        for name, teacher in self._job.teachers.items():
            rows = zip(block.rows, block.needed, strict=True)
            requests = [row.requests[name] for row, needed in rows if name in needed]
            try:
                await self._pool.score(
                    name,
                    requests,
                    top_k=teacher.top_k,
                    temperature=teacher.scored_temperature,
                    logprobs_dtype=teacher.logprobs_dtype,
                )
            except TeacherError:
                if not any(isinstance(each, Rejection) for each in scores[name].values()):
                    raise
        self._require_accepted(block, scores)
        if self._lookaheads is not None:
            rollouts = [row.rollout for row in block.rows if row.rollout is not None]
            await self._lookaheads.score(rollouts)
        return scores

    def _require_accepted(self, block: _Block, scores: Captured) -> None:
        """Raise the first rejection that is not of a long completion, unless rows are skipped."""
        for row, needed in zip(block.rows, block.needed, strict=True):
            for name in needed:
                score = scores[name].get(row.keys[name])
                if not isinstance(score, Rejection):
                    continue
                if score.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    self.progress.too_long += 1
                elif self._job.data.on_bad_line == "fail":
                    path = f"{self._job.data.prompts}:{row.number}"
                    raise DataError(
                        f"{path}: rejected by teacher {name!r}: {score.reason}. Fix the line, or "
                        "set data.on_bad_line=skip.",
                        key=path,
                    )

    async def _store_first(self, show: Callable[[Progress], object]) -> None:
        block, task = self._waiting.popleft()
        scores = await task
        teachers = self._job.teachers
        parts = [ScoredPart(scores[name], teachers[name].logprobs_dtype) for name in teachers]
        try:
            added = await asyncio.to_thread(self._folder.add, parts)
        except OSError as error:
            raise DiskError(
                f"{self._folder.folder}: writing scores failed: {error.strerror or error} (all "
                "earlier rows are stored). Free disk space, then run the same command again.",
                key=str(self._folder.folder),
            ) from error
        self._stored |= block.digests
        progress = self.progress
        progress.rows = block.rows[-1].number
        progress.scored += added
        progress.tokens += sum(
            len(score.completion)
            for part in parts
            for score in part.scores.values()
            if not isinstance(score, Rejection)
        )
        show(progress)

    def _size(self, row: Row) -> dict[str, int]:
        """Return what a row adds to the largest request of its block."""
        teachers = self._job.teachers
        sizes = [size_of(each, teachers[name].top_k) for name, each in row.requests.items()]
        return {name: max(size[name] for size in sizes) for name in LIMITS}


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        part.append(row)
        if len(part) == _LOOKED_UP:
            yield part
            part = []
    if part:
        yield part
