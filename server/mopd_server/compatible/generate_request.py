"""The body of ``POST /generate``: SGLang's request for the log-probabilities of prompts."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mopd_protocol.requests import MOST_SEQUENCES, TokenIds
from mopd_protocol.samples import Message
from mopd_server.compatible.neutral_fields import (
    AllTokens,
    EmptyList,
    IntegerOne,
    IntegerZero,
    MaxTokens,
    Null,
    Off,
    On,
    One,
    Zero,
)


class SamplingParams(BaseModel):
    """Options of sampling, at the values that have no effect: nothing is generated."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_new_tokens: MaxTokens = Field(description="0 or 1: this server scores prompts only")

    # Any value is without an effect, because nothing is sampled.
    temperature: float | None = Field(default=None, ge=0)
    """Ignored: the log-probabilities of prompts are those of temperature 1, as in SGLang."""
    sampling_seed: int | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    n: IntegerOne = None
    min_new_tokens: IntegerZero = None
    stop: EmptyList = None
    stop_token_ids: EmptyList = None
    top_p: One = None
    top_k: AllTokens = None
    min_p: Zero = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None


class GenerateRequest(BaseModel):
    """Prompts whose tokens are scored: ``input_ids`` or ``text``. Nothing is generated."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "input_ids": [1, 2, 3],
                    "sampling_params": {"max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                }
            ]
        },
    )

    input_ids: (
        TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MOST_SEQUENCES)]
        | None
    ) = None
    """The ids of a text, or those of several."""
    text: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_SEQUENCES)] | None = None
    sampling_params: SamplingParams = Field(description="an object with max_new_tokens 0")
    return_logprob: On = Field(description="true: this server scores prompts only")
    logprob_start_len: int = Field(ge=0, description="the first position to return, such as 0")
    top_logprobs_num: int | None = Field(default=None, ge=0)
    """Most likely tokens per position, in ``input_top_logprobs``."""
    lora_path: str | None = None
    """Name of the teacher or of one of its adapters, as in ``GET /v1/models``."""
    messages: list[Message] | list[list[Message]] | None = None
    """See ``CompletionsRequest.messages``."""
    rid: str | None = None
    """Id of the request, repeated in the response."""
    log_metrics: bool | None = None
    return_text_in_logprobs: Off = None
    stream: Off = None
    token_ids_logprob: Null = None
    return_hidden_states: Off = None
    image_data: Null = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        if (self.input_ids is None) == (self.text is None):
            fields = "neither" if self.text is None else "both"
            raise ValueError(f"found {fields}; expected input_ids or text")
        return self

    @property
    def top_k(self) -> int:
        """Number of most likely tokens to return."""
        return self.top_logprobs_num or 0
