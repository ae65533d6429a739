"""``Session``: one trajectory, a conversation of the student with the user's agent."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mopd_protocol.errors import DataError
from mopd_protocol.messages import Message, Tool
from mopd_protocol.samples import Prompt, Rollout, later_turn
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.rollouts.agents.call_formats import CallFormat, call_format_of, reply_of
from mopd_trainer.rollouts.prompt_encoder import EncodedPrompt, sampled_rollout
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.identity import StudentIdentity

#: Prompt ids and number of the sample -> its completion, and the policy version that sampled it.
Generate = Callable[[Sequence[int], int], Awaitable[tuple[Generation, int]]]


@dataclass(frozen=True)
class ChatStudent:
    """A student's template, tokenizer and format of tool calls, and the limits of a trajectory."""

    identity: StudentIdentity
    call_format: CallFormat | None
    splits_thinking: bool
    max_new_tokens: int
    max_turns: int

    @classmethod
    def of(cls, identity: StudentIdentity, config: RolloutConfig, max_turns: int) -> "ChatStudent":
        """Find the format of tool calls of a student's template."""
        splits = "reasoning_content" in str(identity.tokenizer.chat_template)
        call_format = call_format_of(identity)
        return cls(identity, call_format, splits, config.max_new_tokens, max_turns)

    def literal(self, completion: TokenSequence) -> list[str]:
        """Return the text before the token that ends the turn, and that of this token or empty."""
        table = self.identity.table
        names = {token_id: name.encode() for name, token_id in table.controls.items()}
        ids = completion.token_ids.tolist()
        spelled = [names.get(each) or table.bytes_of(each) for each in ids]
        count = len(ids) - completion.ends_turn
        return [
            b"".join(each).decode(errors="replace") for each in (spelled[:count], spelled[count:])
        ]


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn that the student sampled, and the text of its prompt and completion."""

    text: str
    end: str  # of the token that ends it; empty if it was cut off
    rollout: Rollout

    @property
    def token_ids(self) -> list[int]:
        """Ids of prompt and completion."""
        rollout = self.rollout
        return [*rollout.prompt_token_ids.tolist(), *rollout.completion.token_ids.tolist()]


class Session:
    """Sample the student's turns of one trajectory, and record each as a rollout.

    A conversation that continues an earlier turn has the ids of this turn, never those of its text.
    Where the template changes an earlier turn (strips its thinking), the conversation is rendered
    and tokenized anew, and this is what the student sees.

    Args:
        sample: number of the trajectory in its step.
    """

    def __init__(
        self, prompt: Prompt, sample: int, student: ChatStudent, generate: Generate
    ) -> None:
        self.prompt = prompt
        self.sample = sample
        self.ended: str | None = None
        """Reason why no further turn is possible; None while one is."""
        self._student = student
        self._generate = generate
        self._turns: list[Turn] = []

    @property
    def rollouts(self) -> list[Rollout]:
        """The turns in order."""
        return [turn.rollout for turn in self._turns]

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Message:
        """Return the student's next message, whose tool calls have ids.

        Args:
            messages: the whole conversation, as messages or their OpenAI form.
            tools: JSON schemas.

        Raises:
            DataError: for an invalid message; ``ended`` is set if the trajectory has no room for a
                turn.
        """
        message, _ = await self.respond(messages, tools)
        return message

    async def respond(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Message, Rollout]:
        """Return the student's next message and its rollout; see ``chat``."""
        if self.ended is not None:
            raise DataError(f"trajectory: it has ended ({self.ended})", key="messages")
        conversation = tuple(_message(each) for each in messages)
        schemas: tuple[Tool, ...] = tuple(dict(each) for each in tools)
        if schemas and self._student.call_format is None:
            raise DataError(
                "student.model: the chat template shows no tool calls in a known format, so that "
                "none can be read. Use a template with tool calls.",
                key="student.model",
            )
        turn = len(self._turns)
        prompt = later_turn(self.prompt, conversation, tools=schemas, turn=turn, reply=None)
        rendered = self._student.identity.render(conversation, schemas)
        ids = self._prompt_ids(rendered)
        self._require_room(len(ids))
        generation, version = await self._generate(ids, self.sample)
        encoded = EncodedPrompt(prompt, ids, self.sample)
        table = self._student.identity.table
        rollout = sampled_rollout(encoded, generation, table, version=version)
        text, end = self._student.literal(rollout.completion)
        self._turns.append(Turn(rendered + text + end, end, rollout))
        student = self._student
        reply = reply_of(text, student.call_format, splits_thinking=student.splits_thinking)
        return self._with_ids(reply, rollout.turn), rollout

    def _prompt_ids(self, rendered: str) -> list[int]:
        identity = self._student.identity
        earlier = [turn for turn in self._turns if rendered.startswith(turn.text)]
        if not earlier:
            return identity.token_ids(rendered)
        turn = max(earlier, key=lambda each: len(each.text))
        rest = rendered[len(turn.text) :]
        # Behind the control token: at the beginning of a text, some tokenizers add a space.
        behind = identity.token_ids(turn.end + rest)[1:] if turn.end else identity.token_ids(rest)
        return [*turn.token_ids, *behind]

    def _require_room(self, tokens: int) -> None:
        limit, student = self._student.identity.max_length, self._student
        if len(self._turns) >= student.max_turns:
            self.ended = "max_turns"
            raise DataError(
                f"trajectory: no further turn (found {len(self._turns)}, the value of "
                "rollout.agent.max_turns)",
                key="rollout.agent.max_turns",
            )
        if limit is not None and tokens + student.max_new_tokens > limit:
            self.ended = "prompt_too_long"
            raise DataError(
                f"trajectory: the conversation is too long (found {tokens} tokens and "
                f"max_new_tokens {student.max_new_tokens}, expected at most {limit} in all)",
                key="messages",
            )

    def _with_ids(self, message: Message, turn: int) -> Message:
        """Give calls the ids that the model did not write: nine characters, as Mistral's."""
        if not message.tool_calls:
            return message
        calls = [
            call if call.id else call.model_copy(update={"id": self._call_id(turn, number)})
            for number, call in enumerate(message.tool_calls)
        ]
        return message.model_copy(update={"tool_calls": calls})

    def _call_id(self, turn: int, number: int) -> str:
        place = f"{self.prompt.index},{self.sample},{turn},{number}"
        return hashlib.sha256(place.encode()).hexdigest()[:9]


def _message(value: Message | Mapping[str, Any]) -> Message:
    """Return a message; keys of the OpenAI form without a value do not count."""
    if isinstance(value, Message):
        return value
    fields = {k: v for k, v in value.items() if v not in (None, []) or k == "content"}
    parts: Any = fields.get("content")
    if isinstance(parts, list):
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in parts):  # pyright: ignore[reportUnknownMemberType]
            raise DataError(
                "messages: content parts other than text are unsupported", key="messages"
            )
        fields["content"] = "".join(part["text"] for part in parts)
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        details = error.errors()[0]
        place = ".".join(map(str, details["loc"]))
        raise DataError(f"messages: {place}: {details['msg']}", key="messages") from error
