"""The body of ``POST /v1/logprobs``: sequences for a teacher to score."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mopd_protocol.samples import Message

LogprobsDtype = Literal["float32", "float16"]
"""Precision of log-probabilities in a response."""

#: Sequences of one request. Each has a fixed cost, and one body has room for half a
#: million empty ones.
MOST_SEQUENCES = 4096

#: Validation of a list stops at the first error: a body can contain millions, each of which takes
#: memory.
TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class ControlToken(BaseModel):
    """A control token inside a completion, by the literal text it has in the teacher's tokenizer.

    Text is never tokenized to a control token; this is the only way to request one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    control: str


class SequenceRequest(BaseModel):
    """One prompt and the completion to score.

    The prompt is ``messages`` (rendered with the teacher's own chat template), ``prompt`` (plain
    text, tokenized by the teacher) or ``prompt_token_ids`` (teacher ids): exactly one of them. The
    completion is ``completion`` (text, or text and control tokens in order) or
    ``completion_token_ids`` (teacher ids, without an ending token): exactly one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1
    )
    prompt: str | None = None
    prompt_token_ids: TokenIds | None = None
    completion: str | Annotated[list[str | ControlToken], Field(fail_fast=True)] | None = None
    completion_token_ids: TokenIds | None = None
    finished: bool = False
    """The student ended its turn itself: the teacher's end-of-turn token is appended and scored."""
    candidate_ids: Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    """Per completion token (the end-of-turn token included), the teacher ids to score instead of
    the teacher's own top-k."""

    @model_validator(mode="after")
    def _one_prompt_one_completion(self) -> "SequenceRequest":
        prompts = [n for n in ("messages", "prompt", "prompt_token_ids") if self._given(n)]
        if len(prompts) != 1:
            raise ValueError(
                f"found {' and '.join(prompts) or 'no prompt'}; "
                "expected exactly one of messages, prompt, prompt_token_ids"
            )
        completions = [n for n in ("completion", "completion_token_ids") if self._given(n)]
        if len(completions) != 1:
            raise ValueError(
                f"found {' and '.join(completions) or 'no completion'}; "
                "expected exactly one of completion, completion_token_ids"
            )
        return self

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None


class LogprobsRequest(BaseModel):
    """Sequences to score, and how much to return per token.

    If one sequence is invalid, the request is rejected: no partial scores are returned.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "sequences": [
                        {
                            "messages": [{"role": "user", "content": "3 + 4 ="}],
                            "completion": "7",
                            "finished": True,
                        }
                    ],
                    "top_k": 8,
                }
            ]
        },
    )

    sequences: Annotated[list[SequenceRequest], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MOST_SEQUENCES
    )
    top_k: int = Field(default=64, ge=1)
    """Most likely teacher tokens per completion token."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of the returned distributions; other than 1 only where the manifest
    lists the feature."""
    logprobs_dtype: LogprobsDtype = "float32"
    """Precision of the top-k on the binary wire; sums and tails stay float32."""
