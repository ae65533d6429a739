"""A teacher in this process that scores at once, and a scorer in front of it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mopd_client.pool import TeacherPool
from mopd_client.services.expectation import Expectation
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.dataset_scoring.capture import CapturingClient
from mopd_trainer.dataset_scoring.scoring import DatasetScorer, Progress
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.teachers.stored.facts import TeacherFacts, request_options
from mopd_trainer.teachers.stored.folder import ScoreFolder
from tests.client.scripted_teacher import ENCODER, TABLE, TOKENIZER_JSON, manifest

URL = "http://127.0.0.1:9"
MANIFEST = manifest()
MANIFEST_ID = MANIFEST.manifest_id
TOKENIZER = TeacherTokenizer(Tokenizer.from_str(TOKENIZER_JSON), TABLE, ENCODER)


class FakeTeacher:
    """A ``ScoringClient`` whose distributions are a function of the text.

    Args:
        rejected: completion -> HTTP status of the requests that have it.
        fail_after: sequences after which the teacher fails.
    """

    def __init__(
        self, *, rejected: dict[str, int] | None = None, fail_after: int | None = None
    ) -> None:
        self.sent: list[SequenceRequest] = []
        self.requests = 0
        self.counters = Counters()
        self._rejected = rejected or {}
        self._fail_after = fail_after

    @property
    def path(self) -> None:
        return None

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        pass

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        return MANIFEST

    async def tokenizer(self) -> TeacherTokenizer:
        return TOKENIZER

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        self.requests += 1
        if self._fail_after is not None and len(self.sent) + len(sequences) > self._fail_after:
            raise TeacherError("teacher: it fell silent")
        for each in sequences:
            status = self._rejected.get(str(each.completion))
            if status is not None:
                raise TeacherError(f"teacher: rejected with {status}", status=status)
        self.sent += sequences
        return [self.score_of(each, top_k) for each in sequences]

    def score_of(self, sequence: SequenceRequest, top_k: int) -> TeacherScore:
        """Return the score of one sequence."""
        completion = TOKENIZER.completion(sequence)
        text = sequence.model_dump_json().encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())
        rows = len(completion)
        logits = np.sin(np.arange(rows * (top_k + 1)) * 0.7 + seed).reshape(rows, -1)
        logprobs = np.sort(logits - np.log(np.exp(logits).sum(1, keepdims=True)))[:, ::-1]
        ids = np.tile(np.arange(10, 10 + top_k), (rows, 1))
        topk = TopKLogprobs(ids, logprobs[:, :-1], logprobs[:, -1] - 1, logprobs[:, -1])
        return TeacherScore(MANIFEST_ID, completion, topk)

    async def aclose(self) -> None:
        pass


def job_of(data: Path, output: Path, *overrides: str, **options: Any) -> ScoringJob:
    """Return a job of one teacher."""
    return ScoringJob.of(data, output, [URL], overrides, **{"top_k": 4, **options})


def facts_of(job: ScoringJob) -> dict[str, TeacherFacts]:
    return {
        name: TeacherFacts(MANIFEST, TOKENIZER_JSON, request_options(each))
        for name, each in job.teachers.items()
    }


async def score(job: ScoringJob, teacher: FakeTeacher, *, concurrency: int = 3) -> Progress:
    """Score all rows with one teacher."""
    folder = ScoreFolder.create(job.output, facts_of(job), None)
    clients = {name: CapturingClient(name, teacher, MANIFEST) for name in job.teachers}
    for client in clients.values():
        client.folder = folder
    manifests = dict.fromkeys(job.teachers, MANIFEST)
    scorer = DatasetScorer(job, TeacherPool(clients), manifests, folder, concurrency=concurrency)
    try:
        return await scorer.run()
    finally:
        folder.close()


def shards(folder: Path) -> dict[str, bytes]:
    """Return the shards' paths and bytes."""
    paths = sorted((folder / "scores").rglob("*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
