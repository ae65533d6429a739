"""``StoredTeacher``: a teacher whose scores ``mopd score`` has stored."""

import asyncio
from collections.abc import Sequence

from mopd_client.score_store import ScoreKey
from mopd_client.services.expectation import Expectation
from mopd_client.transport.counters import Counters
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.samples import TeacherScore
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.stored.facts import TeacherFacts, request_options
from mopd_trainer.teachers.stored.folder import Rejection, ScoreFolder


class StoredTeacher:
    """A ``ScoringClient`` that reads scores from a folder and sends no request."""

    def __init__(self, name: str, config: TeacherConfig) -> None:
        self.name = name
        self.counters = Counters()
        self._config = config
        self._folder: ScoreFolder | None = None
        self._tokenizer: TeacherTokenizer | None = None

    @property
    def path(self) -> None:
        """None: no server."""
        return None

    @property
    def folder(self) -> ScoreFolder:
        """The scores.

        Raises:
            CheckpointError: if there are none.
        """
        if self._folder is None:
            assert self._config.scores is not None  # checked with the settings
            self._folder = ScoreFolder.open(self._config.scores)
        return self._folder

    @property
    def student(self) -> str | None:
        """Fingerprint of the student whose lookaheads are stored, too; None without."""
        return self.folder.student

    @property
    def _facts(self) -> TeacherFacts:
        return self.folder.facts(self.name)

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Open the folder.

        Raises:
            CheckpointError: if it has no scores.
            ConfigError: if the scores are of other teachers or options.
        """
        source = f"the scores in {self.folder.folder}"
        self._facts.require_options(self.name, request_options(self._config), source)

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Return the manifest of the teacher that scored.

        Raises:
            TeacherMismatchError: if it is not the one that ``expectation`` names.
        """
        if expectation is not None:
            expectation.check(self.name, self._facts.manifest)
        return self._facts.manifest

    async def tokenizer(self) -> TeacherTokenizer:
        """Return the tokenizer of the teacher that scored."""
        if self._tokenizer is None:
            self._tokenizer = self._facts.tokenizer(self.name)
        return self._tokenizer

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Return the stored scores, in order.

        Token ids of the teacher are found by their text, if the teacher tokenized it to these ids.

        Raises:
            TeacherError: if the teacher rejected one.
            DataError: if one is not stored.
            CheckpointError: if a file is damaged.
        """
        if not sequences:
            return []
        tokenizer = await self.tokenizer()
        as_text = [_as_text(sequence, tokenizer) for sequence in sequences]
        request = LogprobsRequest(
            sequences=as_text[:1],
            top_k=top_k,
            temperature=temperature,
            logprobs_dtype=logprobs_dtype,
        )
        manifest_id = self._facts.manifest.manifest_id
        keys = [ScoreKey.of(manifest_id, request, sequence) for sequence in as_text]
        scores: list[TeacherScore] = []
        results = await asyncio.to_thread(self.folder.read, keys)
        for sequence, score in zip(sequences, results, strict=True):
            if isinstance(score, Rejection):
                raise TeacherError(score.reason, status=score.status)
            if score is None or not _has_ids(score, sequence):
                raise self._missing(sequence, score)
            scores.append(score)
        return scores

    async def aclose(self) -> None:
        """Close the index."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _missing(self, sequence: SequenceRequest, score: TeacherScore | None) -> DataError:
        prompt = (sequence.messages or [None])[-1]
        text = ascii("" if prompt is None else prompt.content[:40])
        reason = "it is not in the scored data, or this student's tokenizer changes its text"
        if score is not None:
            reason = "the student divides its text into other tokens than the teacher"
        return DataError(
            f"teacher {self.name!r}: {self.folder.folder} has no score of the completion after "
            f"{text} ({reason}). Run mopd score with the data and settings of this run; with "
            "--student, it sends the texts of the student's tokens.",
            key=f"teachers.{self.name}.scores",
        )


def _as_text(sequence: SequenceRequest, tokenizer: TeacherTokenizer) -> SequenceRequest:
    """Return the request with the text of its token ids; the same if it is none."""
    ids = sequence.completion_token_ids
    if ids is None:
        return sequence
    completion = tokenizer.table.sequence(ids)
    try:
        text = completion.text.decode()
    except UnicodeDecodeError:
        return sequence
    fields = {"completion": text, "completion_token_ids": None}
    return sequence.model_copy(update=fields)


def _has_ids(score: TeacherScore, sequence: SequenceRequest) -> bool:
    """Return True if the score is of the ids of a request that has some."""
    ids = sequence.completion_token_ids
    if ids is None:
        return True
    scored = score.token_ids.tolist()
    return ids == (scored[:-1] if sequence.finished else scored)
