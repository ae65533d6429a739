"""A sample on its way: ``Prompt`` (the data), ``Rollout`` (a completion), ``TeacherScore``."""

from codecs import getincrementaldecoder
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any, Literal

from mopd_protocol.arrays import FloatArray, IntArray, frozen_array
from mopd_protocol.errors import DataError
from mopd_protocol.messages import Message, Tool
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

FinishReason = Literal["stop", "length"]
Source = Literal["rollout", "answers"]


@dataclass(frozen=True)
class Prompt:
    """A conversation to continue, and the teachers that score what follows (none for plain SFT).

    It is one line of the user's data, or the part of a conversation before one of the student's
    turns, of which each is a prompt.

    Raises:
        DataError: when there is no message, or a weight not positive and finite.
    """

    index: int  # position in the data, which names the sample in logs and checkpoints
    messages: tuple[Message, ...]
    teachers: Mapping[str, float]  # teacher name -> weight; weights are normalised to sum to one
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answer: str | None = None  # reference completion, if the run trains on the data's
    format: str = ""  # of the line, for reports
    # teacher name -> messages that this teacher sees instead of the student's
    teacher_messages: Mapping[str, tuple[Message, ...]] = field(
        default_factory=dict[str, tuple[Message, ...]]
    )
    tools: tuple[Tool, ...] = ()  # JSON schemas, which chat templates show
    # Reference message that the student's template renders as the completion, in place of
    # ``answer``: with tool calls or thinking, or one of several turns.
    reply: Message | None = None
    turn: int = 0  # number of the student's turns before this one
    conversation: int = -1  # index of the first turn's prompt, which all turns share

    def __post_init__(self) -> None:
        if not self.messages or not all(self.teacher_messages.values()):
            raise DataError(f"prompt {self.index} has no messages")
        if any(not 0 < weight < inf for weight in self.teachers.values()):
            raise DataError(
                f"prompt {self.index} is routed to {dict(self.teachers)}; "
                "expected teachers each with a finite weight above 0"
            )
        if self.conversation < 0:
            object.__setattr__(self, "conversation", self.index)
        total = sum(self.teachers.values())
        weights = {name: weight / total for name, weight in self.teachers.items()}
        object.__setattr__(self, "teachers", MappingProxyType(weights))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        own = MappingProxyType(dict(self.teacher_messages))
        object.__setattr__(self, "teacher_messages", own)


def messages_for(prompt: Prompt, teacher: str) -> tuple[Message, ...]:
    """Return the messages behind which a teacher scores completions of a prompt."""
    return prompt.teacher_messages.get(teacher, prompt.messages)


def later_turn(prompt: Prompt, messages: tuple[Message, ...], **fields: Any) -> Prompt:
    """Return the prompt of a later turn; what follows the first one's messages follows the
    teachers' too.

    Args:
        messages: the conversation before the turn.
        fields: others that change.

    Raises:
        DataError: if a teacher has its own messages, and the conversation does not begin with the
            student's.
    """
    first = len(prompt.messages)
    if prompt.teacher_messages and messages[:first] != prompt.messages:
        raise DataError(
            f"prompt {prompt.index}: teacher {next(iter(prompt.teacher_messages))!r} has its own "
            "messages, and the conversation does not begin with the student's. Keep the messages "
            "of the data at its beginning.",
            key="teacher_messages",
        )
    own = {name: (*each, *messages[first:]) for name, each in prompt.teacher_messages.items()}
    return replace(prompt, messages=messages, teacher_messages=own, **fields)


@dataclass(frozen=True, eq=False)
class Rollout:
    """A completion that the student generated, with its policy version; or a reference completion.

    A reference completion was not sampled, so it has no sampled logprobs.

    ``finish_reason`` is ``stop`` when the student ended its turn itself (the ending token is then
    the completion's last) and ``length`` when it ran into the limit.

    Raises:
        DataError: when there is not one sampled logprob a token.
    """

    prompt: Prompt
    prompt_token_ids: IntArray  # [prompt tokens], the student's own template and tokenizer
    completion: TokenSequence
    # [tokens], nats, under the distribution that was sampled from
    sampled_logprobs: FloatArray | None
    finish_reason: FinishReason
    policy_version: int
    # [tokens, k], the student's own most likely ids where each token was drawn, most likely first
    # and before top-p, -1 if missing; kept for teachers that score exactly these ids, and for
    # corrections
    student_topk_ids: IntArray | None = None
    corrected_tokens: tuple[int, ...] = ()  # positions of tokens that a teacher's text determined
    # [tokens], nats, of the distributions that were sampled from; kept to select tokens by them
    entropies: FloatArray | None = None
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])  # by name, 0 to 1
    sample: int = 0  # number of its trajectory in the step: the turns of one share it

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", frozen_array(self.prompt_token_ids, "int32"))
        object.__setattr__(self, "rewards", MappingProxyType(dict(self.rewards)))
        if self.sampled_logprobs is not None:
            sampled = frozen_array(self.sampled_logprobs, "float32")
            object.__setattr__(self, "sampled_logprobs", sampled)
            if sampled.shape != (len(self.completion),):
                raise DataError(
                    f"{len(self.completion)} completion tokens but sampled logprobs of shape "
                    f"{sampled.shape}"
                )
        if self.entropies is not None:
            entropies = frozen_array(self.entropies, "float32")
            object.__setattr__(self, "entropies", entropies)
            if entropies.shape != (len(self.completion),):
                raise DataError(
                    f"{len(self.completion)} completion tokens but entropies of shape "
                    f"{entropies.shape}"
                )
        if self.student_topk_ids is not None:
            ids = frozen_array(self.student_topk_ids, "int32")
            object.__setattr__(self, "student_topk_ids", ids)
            if ids.ndim != 2 or len(ids) != len(self.completion):
                raise DataError(
                    f"{len(self.completion)} completion tokens but the student's top-k ids of "
                    f"shape {ids.shape}"
                )
        if (self.finish_reason == "stop") != self.completion.ends_turn:
            raise DataError(
                f"finish reason {self.finish_reason!r}, but the completion "
                f"{'ends' if self.completion.ends_turn else 'does not end'} with a token that "
                "ends the turn"
            )

    @property
    def source(self) -> Source:
        """``rollout`` for the student's completions, ``answers`` for the data's reference ones."""
        return "answers" if self.sampled_logprobs is None else "rollout"

    @property
    def turn(self) -> int:
        """Number of the student's turn in its trajectory, from 0."""
        return self.prompt.turn

    @property
    def invalid_bytes(self) -> int:
        """Bytes of the completion that are not part of a valid UTF-8 character.

        The first bytes of a character that was cut off at the maximum length are not counted.
        """
        decoder = getincrementaldecoder("utf-8")(errors="ignore")
        valid = decoder.decode(self.completion.text, final=self.finish_reason == "stop")
        incomplete, _ = decoder.getstate()
        return len(self.completion.text) - len(valid.encode()) - len(incomplete)


@dataclass(frozen=True, eq=False)
class TeacherScore:
    """Log-probabilities of one completion under a teacher, in the teacher's tokens.

    Raises:
        DataError: if the number of tokens and the number of rows differ.
    """

    manifest_id: str
    completion: TokenSequence
    topk: TopKLogprobs  # row r predicts token r of ``completion``

    def __post_init__(self) -> None:
        if len(self.completion) != len(self.topk):
            raise DataError(
                f"a teacher scored {len(self.topk)} rows for {len(self.completion)} tokens"
            )

    @property
    def token_ids(self) -> IntArray:
        """Teacher token ids of the completion, [tokens]."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> FloatArray:
        """Log-probability of each completion token in nats, [tokens]."""
        return self.topk.token_logprobs
