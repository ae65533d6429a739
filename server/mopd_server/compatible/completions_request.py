"""The body of ``POST /v1/completions``: vLLM's request for the log-probabilities of prompts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mopd_protocol.requests import MOST_SEQUENCES, TokenIds
from mopd_server.compatible.neutral_fields import (
    EmptyList,
    EmptyObject,
    MaxTokens,
    Off,
    One,
    Zero,
)


class CompletionsRequest(BaseModel):
    """Prompts whose tokens are scored. Nothing is generated.

    Sampling options are accepted at the values that have no effect.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={
            "examples": [{"prompt": [[1, 2, 3]], "max_tokens": 1, "prompt_logprobs": 8}]
        },
    )

    model: str | None = None
    """Name of the teacher or of one of its adapters, as in ``GET /v1/models``."""
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_SEQUENCES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MOST_SEQUENCES)]
    )
    """A text, several, the ids of a text, or those of several."""
    max_tokens: MaxTokens = Field(description="0 or 1: this server scores prompts only")
    prompt_logprobs: int = Field(
        ge=1, description="the number of most likely tokens to return per position, such as 8"
    )
    temperature: float | None = Field(default=None, ge=0)
    """Softmax temperature of the returned distributions; 0 is that of greedy decoding, which does
    not scale, as 1."""
    return_token_ids: bool | None = None
    """Adds ``prompt_token_ids`` to every choice."""

    # Of no effect at any value, because nothing is sampled.
    user: str | None = None
    request_id: str | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Off = None
    stream: Off = None
    stream_options: Literal[None] = None
    logprobs: Literal[None] = None
    stop: EmptyList = None
    stop_token_ids: EmptyList = None
    bad_words: EmptyList = None
    include_stop_str_in_output: Off = None
    logit_bias: EmptyObject = None
    allowed_token_ids: Literal[None] = None
    suffix: Literal[None] = None
    top_p: One = None
    top_k: Literal[-1, 0] | None = None
    min_p: Zero = None
    min_tokens: Literal[0] | None = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None
    length_penalty: One = None
    use_beam_search: Off = None
    truncate_prompt_tokens: Literal[None] = None
    add_special_tokens: Literal[True] | None = None
    priority: Literal[0] | None = None
    response_format: Literal[None] = None
    structured_outputs: Literal[None] = None
    return_tokens_as_token_ids: Off = None
