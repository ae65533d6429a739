"""Turns exercises into padded tensors of token ids, as the teacher services will tokenize them.

A prompt is what the chat template renders; an answer is a continuation without an invented
space, part by part; the token that ends a turn follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from random import Random
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mopd.demo.tasks import Exercise, random_part
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable
from mopd_protocol.tokenizers.tokenizer_roles import ChatTokenizer, roles_of

#: Label of a position that is not trained (what torch's cross entropy ignores).
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded examples; labels stand at the position of the token they name."""

    token_ids: Tensor  # [examples, tokens]
    attention: Tensor  # [examples, tokens], 1 for tokens and 0 for padding
    labels: Tensor  # [examples, tokens], IGNORED at prompts and padding


@dataclass(frozen=True)
class Encoder:
    """Prompts and answers in one tokenizer."""

    tokenizer: PreTrainedTokenizerFast

    @cached_property
    def table(self) -> TokenTable:
        """The bytes and roles of the tokenizer."""
        backend = self.tokenizer.backend_tokenizer
        controls = TokenTable.from_tokenizer(backend).controls
        # transformers makes the names of token ids up at run time, so no checker can see them.
        chat_tokenizer = cast(ChatTokenizer, self.tokenizer)
        return TokenTable.from_tokenizer(backend, roles_of(chat_tokenizer, controls))

    @cached_property
    def end_of_turn(self) -> int:
        """The id that ends an answer."""
        return self.table.roles.ending[0]

    def prompts(self, exercises: Sequence[Exercise]) -> list[list[int]]:
        """Token ids of each prompt, up to where the answer begins."""
        rendered = [self._render(exercise) for exercise in exercises]
        encodings = self.tokenizer.backend_tokenizer.encode_batch(
            rendered, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def part(self, text: str) -> list[int]:
        """Token ids of one part of an answer, as a continuation."""
        if text not in self._parts:
            self._parts[text] = self._continuations.encode(text)
        return self._parts[text]

    def answer(self, exercise: Exercise) -> list[int]:
        """Token ids of the right answer, the end of turn included."""
        parts = (self.part(part) for part in exercise.answer_parts)
        return [*chain.from_iterable(parts), self.end_of_turn]

    @cached_property
    def _continuations(self) -> TextEncoder:
        return TextEncoder(self.tokenizer.backend_tokenizer, self.table)

    @cached_property
    def _parts(self) -> dict[str, list[int]]:
        return {}

    def _render(self, exercise: Exercise) -> str:
        conversation = [message.model_dump() for message in exercise.messages]
        rendered = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


def supervised_batch(
    encoder: Encoder, exercises: Sequence[Exercise], corruption: float, random: Random
) -> Batch:
    """Prompts with their answers; only answers are trained.

    ``corruption`` is the probability with which a part of the answer is replaced by a random one
    while the labels keep saying what is right: a teacher reads wrong beginnings, written by a
    student, and must still know how the answer goes on.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, exercise in zip(encoder.prompts(exercises), exercises, strict=True):
        read, right = _read_and_right(encoder, exercise, corruption, random)
        rows.append((prompt + read, [IGNORED] * len(prompt) + right))
    longest = max(len(read) for read, _ in rows)
    padding = encoder.table.roles.pad or 0
    return Batch(
        token_ids=torch.tensor([read + [padding] * (longest - len(read)) for read, _ in rows]),
        attention=torch.tensor([[1] * len(read) + [0] * (longest - len(read)) for read, _ in rows]),
        labels=torch.tensor([right + [IGNORED] * (longest - len(right)) for _, right in rows]),
    )


def _read_and_right(
    encoder: Encoder, exercise: Exercise, corruption: float, random: Random
) -> tuple[list[int], list[int]]:
    """Ids as they are read and ids as they should be, of one answer with its end."""
    read: list[int] = []
    right: list[int] = []
    for position, part in enumerate(exercise.answer_parts):
        ids = encoder.part(part)
        if random.random() < corruption:
            written = encoder.part(random_part(exercise, random, position))
            # The first piece should have been another; once begun, a wrong word goes on as such.
            right += [ids[0], *written[1:]]
            read += written
        else:
            right += ids
            read += ids
    return [*read, encoder.end_of_turn], [*right, encoder.end_of_turn]
