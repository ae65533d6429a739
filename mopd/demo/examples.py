"""Padded token ids of exercises, with the tokenization of the teacher services.

A prompt is rendered by the chat template; a completion is encoded as a continuation, part by part,
and followed by the end-of-turn token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from random import Random
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mopd.demo.tasks import Exercise, random_part
from mopd_protocol import ChatTokenizer, TextEncoder, TokenTable, roles_of

#: Label of a position that is not trained (what torch's cross entropy ignores).
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded examples; labels have the positions of their tokens."""

    token_ids: Tensor  # [examples, tokens]
    attention: Tensor  # [examples, tokens], 1 for tokens and 0 for padding
    labels: Tensor  # [examples, tokens], IGNORED at prompts and padding


@dataclass(frozen=True)
class Encoder:
    """Prompts and completions in one tokenizer."""

    tokenizer: PreTrainedTokenizerFast

    @cached_property
    def table(self) -> TokenTable:
        """Bytes and roles of the tokenizer."""
        backend = self.tokenizer.backend_tokenizer
        controls = TokenTable.from_tokenizer(backend).controls
        # transformers creates the attributes of token ids at run time.
        chat_tokenizer = cast(ChatTokenizer, self.tokenizer)
        return TokenTable.from_tokenizer(backend, roles_of(chat_tokenizer, controls))

    @cached_property
    def end_of_turn(self) -> int:
        """Id of the end-of-turn token."""
        return self.table.roles.ending[0]

    def prompts(self, exercises: Sequence[Exercise]) -> list[list[int]]:
        """Return the token ids of each prompt, generation prompt included."""
        rendered = [self._render(exercise) for exercise in exercises]
        encodings = self.tokenizer.backend_tokenizer.encode_batch(
            rendered, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def part(self, text: str) -> list[int]:
        """Return the token ids of one part of a completion, encoded as a continuation."""
        if text not in self._parts:
            self._parts[text] = self._continuations.encode(text)
        return self._parts[text]

    def completion(self, exercise: Exercise) -> list[int]:
        """Return the token ids of the correct completion, end of turn included."""
        parts = (self.part(part) for part in exercise.completion_parts)
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
    encoder: Encoder,
    exercises: Sequence[Exercise],
    corruption: float,
    random: Random,
    draw_part: Callable[[Exercise, Random, int], str] = random_part,
) -> Batch:
    """Return prompts with their completions; prompts have no labels.

    ``corruption`` is the probability that the input of a part is random (``draw_part``) while its
    labels stay correct: a teacher scores a student's wrong prefixes, and must continue them
    correctly.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, exercise in zip(encoder.prompts(exercises), exercises, strict=True):
        inputs, labels = _inputs_and_labels(encoder, exercise, corruption, random, draw_part)
        rows.append((prompt + inputs, [IGNORED] * len(prompt) + labels))
    longest = max(len(inputs) for inputs, _ in rows)
    padding = encoder.table.roles.pad or 0
    return Batch(
        token_ids=torch.tensor([ids + [padding] * (longest - len(ids)) for ids, _ in rows]),
        attention=torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
        labels=torch.tensor([ids + [IGNORED] * (longest - len(ids)) for _, ids in rows]),
    )


def _inputs_and_labels(
    encoder: Encoder,
    exercise: Exercise,
    corruption: float,
    random: Random,
    draw_part: Callable[[Exercise, Random, int], str],
) -> tuple[list[int], list[int]]:
    """Return input ids and labels of one completion, end of turn included."""
    inputs: list[int] = []
    labels: list[int] = []
    for position, part in enumerate(exercise.completion_parts):
        ids = encoder.part(part)
        if random.random() < corruption:
            corrupted = encoder.part(draw_part(exercise, random, position))
            # After a wrong first piece a wrong word continues, a number correctly.
            is_number = part.strip().isdigit() and len(corrupted) == len(ids)
            labels += ids if is_number else [ids[0], *corrupted[1:]]
            inputs += corrupted
        else:
            labels += ids
            inputs += ids
    return [*inputs, encoder.end_of_turn], [*labels, encoder.end_of_turn]
