"""``align``: align the tokens of two tokenizers on a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.alignment.chunks import Chunk, chunks
from mopd_losses.alignment.text_offsets import align_text
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.inspection.tokenizers import NamedTokenizer, load_tokenizer, readable


@dataclass(frozen=True, eq=False)
class TextAlignment:
    """A text in the tokens of student and teacher, aligned at common byte positions."""

    tokenizers: tuple[NamedTokenizer, NamedTokenizer]
    sequences: tuple[TokenSequence, TokenSequence]
    alignment: Alignment

    @cached_property
    def chunks(self) -> Sequence[Chunk]:
        """All tokens of both sides, in order."""
        student, teacher = self.sequences
        return [*chunks(self.alignment, len(student), len(teacher))]

    def pieces(self, side: int, tokens: tuple[int, int]) -> list[str]:
        """Return tokens of a side (0 student, 1 teacher) as visible text."""
        sequence = self.sequences[side]
        return [
            f"<{sequence.marks[index]}>"
            if index in sequence.marks
            else readable(sequence.text[sequence.byte_starts[index] : sequence.byte_ends[index]])
            for index in range(*tokens)
        ]

    def facts(self) -> dict[str, Any]:
        """Return numbers, token ids and chunks as plain data."""
        size, exact = len(self.sequences[0].text), int(self.alignment.one_to_one.sum())
        aligned = self.alignment.aligned_bytes(self.sequences[0])
        sides = {
            role: {
                "name": tokenizer.name,
                "fingerprint": tokenizer.table.fingerprint,
                "token_ids": sequence.token_ids.tolist(),
                "byte_ends": sequence.byte_ends.tolist(),
            }
            for role, tokenizer, sequence in zip(
                ("student", "teacher"), self.tokenizers, self.sequences, strict=True
            )
        }
        return {
            **sides,
            "bytes": size,
            "aligned_bytes": aligned,
            "aligned_share": aligned / size if size else 1.0,
            "spans": len(self.alignment),
            "one_to_one_spans": exact,
            "one_to_one_share": exact / len(self.alignment) if len(self.alignment) else 1.0,
            "same_text": self.sequences[0].text == self.sequences[1].text,
            "chunks": [
                {
                    "in_span": chunk.in_span,
                    "student_tokens": chunk.student,
                    "teacher_tokens": chunk.teacher,
                    "student_pieces": self.pieces(0, chunk.student),
                    "teacher_pieces": self.pieces(1, chunk.teacher),
                }
                for chunk in self.chunks
            ],
        }


def align(
    student: str, teacher: str, text: str, *, api_key_env: str | None = None
) -> TextAlignment:
    """Tokenize a text, as part of a completion, with two tokenizers, and align the tokens.

    Args:
        student: model folder, hub name, ``tokenizer.json`` or URL of a teacher.
        teacher: the same.
        api_key_env: environment variable with the API key of a teacher.

    Raises:
        MopdError: if a tokenizer cannot be loaded, or the text has no UTF-8 encoding.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError("text: no valid UTF-8 (found half a surrogate pair)", key="text")
    first, second = (load_tokenizer(name, api_key_env=api_key_env) for name in (student, teacher))
    left, right = (side.table.sequence(side.encoder.encode(text)) for side in (first, second))
    return TextAlignment((first, second), (left, right), align_text(left, right, second.encoder))
