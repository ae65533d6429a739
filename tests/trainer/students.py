"""Tiny students and completions of theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mopd_protocol.samples import Message, Prompt, Rollout
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of
from mopd_trainer.student.student import Student
from tests import tiny_models

CPU = torch.device("cpu")
FAMILIES = {
    "qwen": (tiny_models.qwen, "digit"),
    "llama": (tiny_models.llama, "sentencepiece"),
    "gpt_neox": (tiny_models.gpt_neox, "whole_number"),
}
MESSAGES = (Message(role="user", content="3 + 4 ="),)


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One of the three tiny tokenizers."""
    return getattr(tiny_models, f"{name}_tokenizer")()


@cache
def table(name: str) -> TokenTable:
    """Return the token table of a tokenizer, as a student or a teacher has it."""
    description = tokenizer_json(tokenizer(name).backend_tokenizer)
    return TokenTable.from_json(description, roles_of(tokenizer(name), control_tokens(description)))


@cache
def encoder(name: str) -> TextEncoder:
    """Text in the middle of a completion -> its ids."""
    return TextEncoder(tokenizer(name).backend_tokenizer, table(name))


@cache
def encoder_without_bytes(name: str) -> TextEncoder:
    """An encoder whose tokens spell no byte beyond ASCII, so that invalid bytes cannot be sent."""
    own = table(name)
    ascii_only = replace(own, data=np.where(own.data < 0x80, own.data, ord("?")).astype(np.uint8))
    return TextEncoder(tokenizer(name).backend_tokenizer, ascii_only)


def model_of(family: str, seed: int = 0, *, sharpness: float = 1.0) -> PreTrainedModel:
    """A fresh model of one of ``FAMILIES``; ``sharpness`` multiplies its logits.

    Those of a fresh model are nearly all the same.
    """
    make, name = FAMILIES[family]
    model = make(tokenizer(name), seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return model


def student_of(family: str = "qwen", seed: int = 0, *, sharpness: float = 1.0) -> Student:
    """A fresh student."""
    model = model_of(family, seed, sharpness=sharpness)
    return Student(model, tokenizer(FAMILIES[family][1]), CPU)


def ids_of(name: str, *pieces: str | bytes) -> list[int]:
    """Token ids of a completion: text, single raw bytes, and control tokens by their names."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            ids += [table(name).all_bytes.index(bytes([byte])) for byte in piece]
        elif piece in table(name).controls:
            ids.append(table(name).controls[piece])
        else:
            ids += encoder(name).encode(piece)
    return ids


def rollout(
    name: str,
    token_ids: Sequence[int],
    *,
    teachers: Mapping[str, float] | None = None,
    prompt_ids: Sequence[int] = (5, 6, 7),
    index: int = 0,
    messages: tuple[Message, ...] = MESSAGES,
    topk_ids: np.ndarray | None = None,
) -> Rollout:
    """A completion as the sampler hands it on."""
    completion = table(name).sequence(token_ids)
    return Rollout(
        prompt=Prompt(index=index, messages=messages, teachers=teachers or {"math": 1.0}),
        prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
        completion=completion,
        sampled_logprobs=np.full(len(completion), -1.0, dtype=np.float32),
        finish_reason="stop" if completion.ends_turn else "length",
        policy_version=0,
        student_topk_ids=topk_ids,
    )
