"""``TokenizerPair``: what depends only on two tokenizers, in memory and on disk."""

import hashlib
import json
import logging
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mopd_losses.alignment.byte_strings import control_characters
from mopd_losses.prefix.canonical_tokens import CanonicalTokens
from mopd_losses.prefix.naming.cuts import Cuts
from mopd_losses.prefix.naming.decisions import Decisions
from mopd_losses.prefix.naming.separate_tokens import SeparateTokens
from mopd_losses.prefix.other_tokenizations import OtherTokenizations
from mopd_losses.prefix.vocabulary.marked_ranges import MarkedRanges
from mopd_losses.prefix.vocabulary.marks import Marks, MarksTable
from mopd_losses.prefix.vocabulary.merges import Merges
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: Of the stored tables; a change of keys, values or rules needs another one.
FORMAT_VERSION = 13

#: The tables are saved when they have grown by this share, so that all saves together cost no more
#: than a few of the last one.
_GROWTH = 1 / 4

logger = logging.getLogger(__name__)


class TokenizerPair:
    """A student's and a teacher's vocabulary and tokenizer.

    What their tokenizers were called for is kept: up to 500,000 entries of each of eleven tables,
    on disk at most 88 MB.

    Args:
        folder: of the stored tables, ``prefix-KEY.safetensors`` with a key of both tokenizers; a
            file that cannot be read, or of another version, is computed and written again.
    """

    def __init__(
        self,
        student: TokenTable,
        student_encoder: TextEncoder,
        teacher: TokenTable,
        teacher_encoder: TextEncoder,
        folder: Path | None = None,
    ) -> None:
        self.controls = control_characters(student, teacher)
        self.student = SortedVocabulary(student, self.controls)
        self.teacher = SortedVocabulary(teacher, self.controls)
        self.marks = MarksTable()
        self.cuts = Cuts(self.student, student_encoder)
        self.decisions = Decisions(self.student, self.teacher, self.cuts)
        self.separate = SeparateTokens(
            self.student, student_encoder, self.teacher, teacher_encoder, self.cuts, self.marks
        )
        sides = (self.student, student_encoder), (self.teacher, teacher_encoder)
        student_merges, teacher_merges = (Merges(side, encoder.merges) for side, encoder in sides)
        self.student_canonical, self.teacher_canonical = (CanonicalTokens(*side) for side in sides)
        self.student_tokenizations = OtherTokenizations(
            *sides[0], student_merges, self.marks, self.student_canonical
        )
        self.teacher_tokenizations = OtherTokenizations(
            *sides[1], teacher_merges, self.marks, self.teacher_canonical
        )
        self.student_ranges = MarkedRanges(self.student)
        self.teacher_ranges = MarkedRanges(self.teacher)
        self._path = folder / f"prefix-{_key(student, teacher)}.safetensors" if folder else None
        self._tables = {
            "cuts": self.cuts.table,
            "separate_tokens": self.separate.table,
            "student_tokenizations": self.student_tokenizations.table,
            "teacher_tokenizations": self.teacher_tokenizations.table,
            "student_divided_cells": self.student_tokenizations.divided,
            "teacher_divided_cells": self.teacher_tokenizations.divided,
            "student_joined_texts": self.student_tokenizations.joined,
            "teacher_joined_texts": self.teacher_tokenizations.joined,
            "teacher_probes": self.teacher_tokenizations.probed,
            "student_shorter_tokens": self.student_tokenizations.shorter.table,
            "teacher_shorter_tokens": self.teacher_tokenizations.shorter.table,
        }
        if self._path is not None and self._path.exists():
            self._load(self._path)
        self._saved = self._entries()

    def clear_if_full(self) -> None:
        """Discard marks, and what refers to them, if there are too many; between two batches."""
        if self.marks.is_full:
            self.marks.clear()
            self.separate.table.clear()
            self.student_ranges.clear()
            self.teacher_ranges.clear()

    def save_if_grown(self) -> None:
        """Save the tables if they have more entries than the file, by a share."""
        entries = self._entries()
        if self._path is None or entries <= self._saved * (1 + _GROWTH):
            return
        self._saved = entries
        numbers, values = np.unique(self.separate.table.items()[1], return_inverse=True)
        marks = json.dumps([self.marks.marks_of(number) for number in numbers.tolist()])
        tensors: dict[str, NDArray[np.generic]] = {
            "marks": np.frombuffer(marks.encode(), dtype=np.uint8)
        }
        for name, table in self._tables.items():
            tensors[f"{name}.keys"], tensors[f"{name}.values"] = table.items()
        tensors["separate_tokens.values"] = values
        try:
            with replacing(self._path) as temporary:
                temporary.write_bytes(save(tensors))
        except (OSError, SafetensorError) as error:
            logger.warning("%s: tables of prefix KL were not saved (%s)", self._path, error)

    def _load(self, path: Path) -> None:
        try:
            tensors = load_file(path)
            listed = cast(list[Marks], json.loads(tensors["marks"].tobytes()))
            marks = [tuple((str(t), bool(b)) for t, b in each) for each in listed]
            columns = {
                name: (tensors[f"{name}.keys"], tensors[f"{name}.values"]) for name in self._tables
            }
            for keys, values in columns.values():
                if keys.shape != values.shape or keys.dtype != np.uint64 or values.min(initial=0):
                    raise ValueError("keys and values do not match")
            numbers = np.array([self.marks.number_of(each) for each in marks], dtype=np.int64)
            keys, values = columns["separate_tokens"]
            columns["separate_tokens"] = keys, numbers[values]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
            logger.warning("%s: cannot be read (%s); computing its tables again", path, error)
            return
        for name, (keys, values) in columns.items():
            self._tables[name].add(keys, values)

    def _entries(self) -> int:
        return sum(map(len, self._tables.values()))


def _key(student: TokenTable, teacher: TokenTable) -> str:
    """32 hex digits over everything that the tables depend on."""
    sides = [[table.fingerprint, table.roles.model_dump()] for table in (student, teacher)]
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *sides]).encode()).hexdigest()[:32]
