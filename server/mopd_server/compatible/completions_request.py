"""The body of ``POST /v1/completions``: vLLM's request for the log-probabilities of prompts."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mopd_protocol.requests import MOST_SEQUENCES, TokenIds
from mopd_protocol.samples import Message
from mopd_server.compatible.neutral_fields import (
    AllTokens,
    EmptyList,
    EmptyObject,
    IntegerOne,
    IntegerZero,
    MaxTokens,
    Null,
    Off,
    On,
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
        strict=True,
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
    messages: list[Message] | list[list[Message]] | None = None
    """Messages of the prompt, or of each prompt, without the completion: only for a service with
    a student, which otherwise derives these from the ids."""
    return_token_ids: bool | None = None
    """Adds ``prompt_token_ids`` to every choice."""

    # Any value is without an effect, because nothing is sampled.
    user: str | None = None
    request_id: str | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    n: IntegerOne = None
    best_of: IntegerOne = None
    echo: Off = None
    detokenize: Off = None
    stream: Off = None
    stream_options: Null = None
    logprobs: Null = None
    stop: EmptyList = None
    stop_token_ids: EmptyList = None
    bad_words: EmptyList = None
    include_stop_str_in_output: Off = None
    logit_bias: EmptyObject = None
    allowed_token_ids: Null = None
    suffix: Null = None
    top_p: One = None
    top_k: AllTokens = None
    min_p: Zero = None
    min_tokens: IntegerZero = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None
    length_penalty: One = None
    use_beam_search: Off = None
    truncate_prompt_tokens: Null = None
    add_special_tokens: On | None = None
    priority: IntegerZero = None
    response_format: Null = None
    structured_outputs: Null = None
    return_tokens_as_token_ids: Off = None
