"""Requests -> token ids of the teacher: its own chat template, its own tokenizer.

Prompt and completion are tokenized apart, so that the seam between them is a byte boundary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain, groupby
from typing import cast

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mopd_protocol.arrays import IntArray
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.samples import Message
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import (
    TextEncoder,
    TokenRoles,
    TokenTable,
    control_tokens,
    encode_prompt,
    encode_text,
)
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import ChatTokenizer, roles_of
from mopd_server.engines.base import ScoringTask
from mopd_server.scoring.tokenizer_loading import TOKENIZER_FILE, tokenizer_files
from mopd_server.service_error import ServiceError


@dataclass(frozen=True, eq=False)
class TokenizedSequence:
    """A sequence of a request, in the teacher's tokens, checked and ready to score."""

    prompt_ids: IntArray  # [prompt tokens], at least one
    completion: TokenSequence
    candidate_ids: tuple[IntArray, ...] | None  # one per completion token

    @property
    def task(self) -> ScoringTask:
        """What the engine is given."""
        return ScoringTask(self.prompt_ids, self.completion.token_ids, self.candidate_ids)


class RequestTokenizer:
    """A teacher's tokenizer, its chat template and its table of token bytes.

    Raises:
        DataError: for a tokenizer whose tokens do not spell bytes by themselves.
        ConfigError: for a chat template that cannot render a question and an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._chat = tokenizer
        self.files = tokenizer_files(tokenizer)
        # What is served is what is used. A copy also keeps threads apart: the Hugging Face wrapper
        # changes settings of its tokenizer on every call.
        self._tokenizer = Tokenizer.from_str(self.files[TOKENIZER_FILE])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.table = TokenTable.from_tokenizer(self._tokenizer, _roles(tokenizer, self._tokenizer))
        self._completions = TextEncoder(self._tokenizer, self.table)

    @property
    def renders_messages(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._chat.chat_template)

    @property
    def template_hash(self) -> str | None:
        """32 hex digits of the chat template."""
        template = self._chat.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def tokenize(self, sequence: SequenceRequest) -> TokenizedSequence:
        """The sequence in this teacher's tokens.

        Raises:
            ServiceError: when this teacher has no such ids, control tokens, roles or ending.
        """
        prompt_ids = self._prompt_ids(sequence)
        if not prompt_ids:
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                "the prompt has no tokens, so nothing predicts the first completion token; "
                "expected at least one token, such as the beginning-of-text token",
            )
        completion_ids = self._completion_ids(sequence)
        return TokenizedSequence(
            prompt_ids=np.array(prompt_ids, dtype=np.int32),
            completion=self.table.sequence(completion_ids),
            candidate_ids=self._candidate_ids(sequence, len(completion_ids)),
        )

    def _prompt_ids(self, sequence: SequenceRequest) -> list[int]:
        if sequence.prompt_token_ids is not None:
            self._require_known("prompt_token_ids", sequence.prompt_token_ids)
            return sequence.prompt_token_ids
        if sequence.messages is not None:
            # The template writes the special tokens itself.
            for message in sequence.messages:
                _require_unicode("messages", message.role + message.content)
            rendered = self._render(sequence.messages)
            return encode_text(self._tokenizer, rendered)
        assert sequence.prompt is not None
        _require_unicode("prompt", sequence.prompt)
        begin = [] if self.table.roles.bos is None else [self.table.roles.bos]
        return encode_prompt(self._tokenizer, sequence.prompt) or begin

    def _render(self, messages: Sequence[Message]) -> str:
        if not self.renders_messages:
            raise ServiceError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "this teacher has no chat template, so it cannot take messages; "
                "expected prompt or prompt_token_ids",
            )
        try:
            rendered = self._chat.apply_chat_template(
                [message.model_dump() for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ServiceError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"this teacher's chat template refuses messages with the roles {roles}: {error}",
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _completion_ids(self, sequence: SequenceRequest) -> list[int]:
        if sequence.completion_token_ids is not None:
            self._require_known("completion_token_ids", sequence.completion_token_ids)
            ids = sequence.completion_token_ids
        else:
            ids = self._encode(_parts(sequence))
        return [*ids, self._ending(ids)] if sequence.finished else ids

    def _encode(self, parts: Sequence[str | ControlToken]) -> list[int]:
        """Neighbouring texts are one text: only control tokens are seams."""
        ids: list[int] = []
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                text = "".join(part for part in run if isinstance(part, str))
                _require_unicode("completion", text)
                ids += self._completions.encode(text)
            else:
                ids += [self._control(part) for part in run if isinstance(part, ControlToken)]
        return ids

    def _control(self, part: ControlToken) -> int:
        if part.control not in self.table.controls:
            known = ", ".join(sorted(self.table.controls)[:16]) or "none"
            raise ServiceError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"this teacher has no control token {part.control!r}; it has {known}",
            )
        return self.table.controls[part.control]

    def _ending(self, ids: Sequence[int]) -> int:
        end_of_turn = self.table.roles.end_of_turn
        if end_of_turn is None:
            raise ServiceError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "this teacher has no end-of-turn token to score; expected finished: false",
            )
        if ids and ids[-1] in self.table.roles.ending:
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                f"the completion already ends with ending token {ids[-1]} and finished: true would "
                "add another; expected a completion without its ending token",
            )
        return end_of_turn

    def _candidate_ids(
        self, sequence: SequenceRequest, completion_tokens: int
    ) -> tuple[IntArray, ...] | None:
        rows = sequence.candidate_ids
        if rows is None:
            return None
        if len(rows) != completion_tokens:
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                f"candidate_ids has {len(rows)} rows, expected {completion_tokens}: one per "
                "completion token of this teacher, the end-of-turn token included",
            )
        self._require_known("candidate_ids", list(chain.from_iterable(rows)))
        return tuple(np.array(list(dict.fromkeys(row)), dtype=np.int32) for row in rows)

    def _require_known(self, field: str, ids: Sequence[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self.table.size:  # said here because such an id may not even fit an array
            raise ServiceError(
                HTTPStatus.BAD_REQUEST,
                f"{field} holds id {highest}, but this teacher's tokenizer has {self.table.size} "
                "ids; were ids of another tokenizer (the student's) sent? send text instead",
            )
        try:
            self.table.require_known(np.array(ids, dtype=np.int64))
        except DataError as error:
            raise ServiceError(HTTPStatus.BAD_REQUEST, f"{field}: {error}") from error


def _roles(chat: PreTrainedTokenizerFast, tokenizer: Tokenizer) -> TokenRoles:
    try:
        # Its ids are attributes made at run time, which no type checker sees.
        return roles_of(cast(ChatTokenizer, chat), control_tokens(tokenizer_json(tokenizer)))
    except TemplateError as error:
        raise ConfigError(
            f"the chat template cannot render a question and an answer: {error}; "
            "expected a template for messages of the roles user and assistant"
        ) from error


def _require_unicode(field: str, text: str) -> None:
    """JSON can spell half of a character (a lone surrogate), which has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ServiceError(
            HTTPStatus.BAD_REQUEST,
            f"{field} holds {text[error.start]!a} at character {error.start}, a lone surrogate; "
            "expected Unicode text",
        ) from error


def _parts(sequence: SequenceRequest) -> Sequence[str | ControlToken]:
    completion = sequence.completion
    assert completion is not None
    return [completion] if isinstance(completion, str) else completion
