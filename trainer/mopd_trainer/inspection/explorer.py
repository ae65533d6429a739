"""``Explorer``: a text in two or more tokenizers, for the page of ``mopd align --serve``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.alignment.chunks import chunks, run_lengths
from mopd_losses.alignment.text_offsets import align_text
from mopd_losses.config import LossConfig, ProjectionSettings
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.data.token_listing import spellings, token_listing
from mopd_trainer.inspection.equal_belief import equal_belief
from mopd_trainer.inspection.projection import project
from mopd_trainer.inspection.tokenizers import NamedTokenizer

#: Maximum length of a text, in UTF-8 bytes.
MAX_BYTES = 50_000
#: The equal-belief check is made on at most this many tokens of the student.
BELIEF_TOKENS = 256
#: Losses of the equal-belief check: those for any tokenizers with a meaning of zero.
BELIEF_LOSSES = ("prefix_kl", "ctkd", "simct", "gold", "alm")
#: Teacher tokens shown of a projection row, largest weight first.
_TARGETS = 5

JSON = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Explorer:
    """A student's tokenizer, and those of its teachers; safe to use from several threads."""

    tokenizers: Sequence[NamedTokenizer]
    _cache: ProjectionCache = field(default_factory=ProjectionCache)
    _lock: Lock = field(default_factory=Lock)

    def facts(self) -> list[JSON]:
        """Return the facts of each tokenizer, the student's first."""
        return [
            {
                "name": each.name,
                "ids": each.table.size,
                "width": each.logit_width,
                "fingerprint": each.table.fingerprint,
            }
            for each in self.tokenizers
        ]

    def align(self, text: str) -> JSON:
        """Return the tokens of a text, and for each teacher its chunks and projection rows.

        Raises:
            DataError: if the text is too long or has no UTF-8 encoding.
        """
        with self._lock:
            sequences = self._sequences(text)
            return {
                "text": text,
                "tokens": [token_listing(sequence) for sequence in sequences],
                "pairs": [
                    self._pair(teacher, sequences[0], sequence)
                    for teacher, sequence in enumerate(sequences[1:], 1)
                ],
            }

    def beliefs(self, text: str, teacher: int) -> list[JSON]:
        """Return the equal-belief check of a teacher on the start of a text.

        Raises:
            DataError: as ``align``.
        """
        with self._lock:
            sequences = self._sequences(text)
            first, second = sequences[0], sequences[teacher]
            alignment = align_text(first, second, self.tokenizers[teacher].encoder)
            pair = _beginning(first, second, alignment)
            return [self._belief(loss, teacher, pair) for loss in BELIEF_LOSSES]

    @cached_property
    def _projections(self) -> dict[int, ProjectionMatrix]:
        return {}

    def _sequences(self, text: str) -> list[TokenSequence]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError("text: no valid UTF-8 (found half a surrogate pair)", key="text")
        size = len(text.encode())
        if size > MAX_BYTES:
            raise DataError(
                f"text: too long (found {size:,} bytes, expected at most {MAX_BYTES:,})", key="text"
            )
        return [each.table.sequence(each.encoder.encode(text)) for each in self.tokenizers]

    def _pair(self, teacher: int, student: TokenSequence, sequence: TokenSequence) -> JSON:
        alignment = align_text(student, sequence, self.tokenizers[teacher].encoder)
        size, aligned = len(student.text), alignment.aligned_bytes(student)
        return {
            "teacher": teacher,
            "chunks": [*run_lengths(chunks(alignment, len(student), len(sequence)))],
            "spans": len(alignment),
            "one_to_one": int(alignment.one_to_one.sum()),
            "aligned_share": aligned / size if size else 1.0,
            "same_text": student.text == sequence.text,
            "projection": self._projection_rows(teacher, student.token_ids),
        }

    def _projection_rows(self, teacher: int, student_ids: Any) -> JSON:
        """Return the teacher ids with weights of each student token, and their spellings."""
        if teacher not in self._projections:
            settings = ProjectionSettings()
            sides = self.tokenizers[0], self.tokenizers[teacher]
            self._projections[teacher] = project(*sides, settings)
        matrix = self._projections[teacher]
        chosen = np.isin(matrix.student_ids, student_ids)
        columns = np.repeat(np.arange(matrix.teacher_size), np.diff(matrix.column_starts))
        rows: dict[str, list[list[float]]] = {str(token): [] for token in student_ids.tolist()}
        for student, target, weight in zip(
            matrix.student_ids[chosen].tolist(),
            columns[chosen].tolist(),
            matrix.weights[chosen].tolist(),
            strict=True,
        ):
            rows[str(student)].append([target, round(weight, 4)])
        rows = {
            token: sorted(row, key=lambda entry: -entry[1])[:_TARGETS]
            for token, row in rows.items()
        }
        targets = {int(entry[0]) for row in rows.values() for entry in row}
        table = self.tokenizers[teacher].table
        return {"rows": rows, "spellings": spellings(table, targets)}

    def _belief(self, loss: str, teacher: int, pair: tuple[TokenSequence, TokenSequence]) -> JSON:
        config = TypeAdapter[LossConfig](LossConfig).validate_python({"type": loss})
        sides = self.tokenizers[0], self.tokenizers[teacher]
        try:
            belief = equal_belief(config, *sides, pair, cache=self._cache)
        except ConfigError as error:
            return {"loss": loss, "error": str(error)}
        values = belief.nats.tolist()
        return {
            "loss": loss,
            "tokens": len(pair[0]),
            "compared": int(np.isfinite(belief.nats).sum()),
            "nats": [round(value, 5) if value == value else None for value in values],
            "nats_per_token": float(np.nansum(belief.nats)) / max(1, len(values)),
            "pushed_down": belief.pushed_down.tolist(),
        }


def _beginning(
    student: TokenSequence, teacher: TokenSequence, alignment: Alignment
) -> tuple[TokenSequence, TokenSequence]:
    """Cut both sequences at the end of the last span within ``BELIEF_TOKENS``."""
    inside = int((alignment.student_ends <= BELIEF_TOKENS).sum())
    if len(student) <= BELIEF_TOKENS or not inside:
        return student, teacher
    ends = int(alignment.student_ends[inside - 1]), int(alignment.teacher_ends[inside - 1])
    return _first(student, ends[0]), _first(teacher, ends[1])


def _first(sequence: TokenSequence, tokens: int) -> TokenSequence:
    ends = sequence.byte_ends[:tokens]
    marks = {position: name for position, name in sequence.marks.items() if position < tokens}
    return TokenSequence(sequence.token_ids[:tokens], ends, sequence.text[: int(ends[-1])], marks)
