"""The body of ``POST /v1/logprobs``: sequences for a teacher to score."""

import hashlib
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from mopd_protocol.messages import Message, Tool, conversation_key, json_text

LogprobsDtype = Literal["float32", "float16"]
"""Precision of log-probabilities in a response."""

#: Header of responses to scoring requests: ``body_hash`` of the body that was scored.
REQUEST_HEADER = "Mopd-Request"

#: Header of scoring requests of other trainers: ``tail`` if the loss counts the mass outside the
#: entries, ``token`` if it uses the sampled tokens' log-probabilities only, else the loss's name.
LOSS_HEADER = "Mopd-Loss"


def body_hash(body: bytes | bytearray) -> str:
    """Return 32 hex digits over the body of a request; detects changes on its way, not forgery."""
    return hashlib.sha256(body).hexdigest()[:32]


#: Sequences of one request. Each has a fixed cost, and one body has room for half a
#: million empty ones.
MOST_SEQUENCES = 4096

#: Validation of a list stops at the first error: a body can contain millions, each of which takes
#: memory.
TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


#: Names that the rendering functions (``apply_chat_template`` of transformers and ``render`` of
#: jinja) and their templates have already. A template from outside would be executed.
RESERVED_TEMPLATE_KEYS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "cycler",
        "dict",
        "documents",
        "joiner",
        "lipsum",
        "max_length",
        "messages",
        "namespace",
        "padding",
        "raise_exception",
        "range",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


def _require_template_keys(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    reserved = sorted(RESERVED_TEMPLATE_KEYS & values.keys())
    if reserved:
        raise ValueError(
            f"cannot be set: {', '.join(reserved)} (the function that renders the template has "
            "this name already; expected variables of the template, such as enable_thinking)"
        )
    return values


ChatTemplateKwargs: TypeAlias = Annotated[
    dict[str, JsonValue], AfterValidator(_require_template_keys)
]
"""Variables of a chat template, such as ``enable_thinking``."""


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
    chat_template_kwargs: ChatTemplateKwargs | None = None
    """Variables of the chat template that renders ``messages``."""
    tools: Annotated[
        Annotated[list[Tool], Field(fail_fast=True)] | None, AfterValidator(lambda v: v or None)
    ] = None
    """JSON schemas of tools that the chat template shows with ``messages``."""
    prompt: str | None = None
    prompt_token_ids: TokenIds | None = None
    completion: str | Annotated[list[str | ControlToken], Field(fail_fast=True)] | None = None
    completion_token_ids: TokenIds | None = None
    finished: bool = False
    """The student ended its turn itself: the teacher's end-of-turn token is appended and scored."""
    candidate_ids: Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    """Per completion token (the end-of-turn token included), the teacher ids to score instead of
    the teacher's own top-k."""

    @property
    def shown_tools(self) -> str | None:
        """The conversation as JSON in the order of its keys, which templates show; None without
        tools and tool calls."""
        if not self.tools and not any(each.tool_calls for each in self.messages or ()):
            return None
        return conversation_key(self.messages or (), self.tools or ())

    @property
    def prompt_texts(self) -> list[str]:
        """The texts of the prompt; tools and tool calls as JSON."""
        messages = [text for message in self.messages or () for text in message.texts]
        return [self.prompt or "", *messages, *map(json_text, self.tools or ())]

    @property
    def completion_parts(self) -> list[str | ControlToken]:
        """The completion as text and control tokens, in order; empty if it is token ids."""
        if self.completion is None:
            return []
        return [self.completion] if isinstance(self.completion, str) else self.completion

    @property
    def completion_texts(self) -> list[str]:
        """The texts of ``completion_parts``."""
        return [part for part in self.completion_parts if isinstance(part, str)]

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
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("found chat_template_kwargs without messages; expected messages")
        if self.tools and self.messages is None:
            raise ValueError("found tools without messages; expected messages")
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
