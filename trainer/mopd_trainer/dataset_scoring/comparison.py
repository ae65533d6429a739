"""``compare``: a random sample of stored scores, compared with the running teachers."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from mopd_client.pool import TeacherPool
from mopd_client.score_agreement import Agreement, KnownRow
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.dataset_scoring.requests import read_rows
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.dataset_scoring.student_texts import StudentTexts, read_student
from mopd_trainer.teachers.connect import teacher_pool
from mopd_trainer.teachers.stored.facts import request_options
from mopd_trainer.teachers.stored.folder import ScoreFolder


@dataclass
class TeacherComparison:
    """Stored and new scores of one teacher."""

    completions: int = 0
    tokens: int = 0
    largest: float = 0.0
    """Largest difference of a completion token's log-probability, in nats."""
    differences: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Comparison:
    """The comparison by teacher."""

    teachers: Mapping[str, TeacherComparison]

    @property
    def differences(self) -> list[str]:
        """Return the differences above rounding."""
        return [f"teacher {n}: {text}" for n, t in self.teachers.items() for text in t.differences]

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        summary = [
            f"teacher {name}: {each.completions:,} completions, {each.tokens:,} tokens, "
            f"{len(each.differences)} differences; largest difference of a token's "
            f"log-probability {each.largest:.2g} nats"
            for name, each in self.teachers.items()
        ]
        return [*summary, *self.differences]


async def compare(
    job: ScoringJob, *, sample: int, seed: int = 0, wait_seconds: float = 60.0
) -> Comparison:
    """Score a random sample of the rows again, and compare with the stored scores.

    Differences up to the rounding of the teacher's precision are agreement.

    Args:
        sample: completions of each teacher; all, if there are fewer.

    Raises:
        MopdError: if a teacher is unavailable, or the folder has no scores.
    """
    folder = ScoreFolder.open(job.output)
    try:
        for name, teacher in job.teachers.items():
            facts = folder.facts(name)
            facts.require_options(name, request_options(teacher), str(job.output))
        async with teacher_pool(job.teachers) as pool:
            await pool.wait_until_ready(wait_seconds)
            manifests = await pool.handshake_all()
            student = await _student(job, pool)
            return Comparison(
                {
                    name: await _compare(job, name, folder, pool, manifests, sample, seed, student)
                    for name in job.teachers
                }
            )
    finally:
        folder.close()


async def _student(job: ScoringJob, pool: TeacherPool) -> StudentTexts | None:
    if job.student is None:
        return None
    encoders = {name: (await pool.client(name).tokenizer()).encoder for name in job.teachers}
    return StudentTexts(read_student(job.student), encoders)


async def _compare(
    job: ScoringJob,
    name: str,
    folder: ScoreFolder,
    pool: TeacherPool,
    live: Mapping[str, Manifest],
    sample: int,
    seed: int,
    student: StudentTexts | None,
) -> TeacherComparison:
    result = TeacherComparison()
    manifest = folder.facts(name).manifest
    if live[name].manifest_id != manifest.manifest_id:
        result.differences.append(
            f"manifest {live[name].manifest_id[:12]}, stored {manifest.manifest_id[:12]} "
            f"({manifest.model} {manifest.revision[:12]}, {manifest.engine} "
            f"{manifest.engine_version}, {manifest.dtype})"
        )
    teacher = job.teachers[name]
    for number, request, stored in _sampled(job, name, folder, sample, seed, student):
        [score] = await pool.score(
            name,
            [request],
            top_k=teacher.top_k,
            temperature=teacher.scored_temperature,
            logprobs_dtype=teacher.logprobs_dtype,
        )
        _add(result, number, stored, score, manifest, teacher.scored_temperature)
    return result


def _sampled(
    job: ScoringJob,
    name: str,
    folder: ScoreFolder,
    sample: int,
    seed: int,
    student: StudentTexts | None,
) -> list[tuple[int, SequenceRequest, TeacherScore]]:
    """Return the stored completions whose keys have the lowest hashes: a choice by the seed."""
    manifests = {each: folder.facts(each).manifest for each in job.teachers}
    kept: dict[str, tuple[int, SequenceRequest, TeacherScore]] = {}
    heap: list[tuple[int, str]] = []  # the largest hash, negated, is first
    for row in read_rows(job, manifests, student):
        key = row.keys.get(name)
        if key is None or key.digest in kept:
            continue
        digest = blake2b(f"{seed}:{key.digest}".encode(), digest_size=8).digest()
        order = -int.from_bytes(digest)
        if len(heap) == sample and order < heap[0][0]:
            continue
        [score] = folder.read([key])
        if not isinstance(score, TeacherScore):
            continue
        kept[key.digest] = (row.number, row.requests[name], score)
        heapq.heappush(heap, (order, key.digest))
        if len(heap) > sample:
            kept.pop(heapq.heappop(heap)[1])
    return sorted(kept.values(), key=lambda each: each[0])


def _add(
    result: TeacherComparison,
    number: int,
    stored: TeacherScore,
    live: TeacherScore,
    manifest: Manifest,
    temperature: float,
) -> None:
    """Add the comparison of one completion, with its first difference."""
    result.completions += 1
    result.tokens += len(stored.completion)
    if stored.token_ids.tolist() != live.token_ids.tolist():
        result.differences.append(f"row {number}: the completion has other tokens")
        return
    difference = np.abs(stored.logprobs - live.logprobs)
    result.largest = max(result.largest, float(difference.max(initial=0.0)))
    agreement = Agreement(manifest.dtype, temperature)
    exact = manifest.features.exact_tails
    for row in range(len(stored.completion)):
        first, second = (KnownRow.of(s, row, None, exact_tails=exact) for s in (stored, live))
        disagreement = agreement.disagreement(row, first, second)
        if disagreement is not None:
            result.differences.append(
                f"row {number}, token {row}: {disagreement.subject} (found "
                f"{disagreement.second:.4f}, expected {disagreement.expected:.4f} ± "
                f"{disagreement.tolerance:.4f} nats)"
            )
            return
