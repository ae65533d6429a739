"""Requests -> token ids of the teacher, by its chat template and tokenizer.

Prompt and completion are tokenized separately, so that a token boundary lies between the two.
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
from mopd_server.service_error import ServiceError, invalid_field


@dataclass(frozen=True, eq=False)
class TokenizedSequence:
    """A validated sequence of a request in the teacher's tokens."""

    prompt_ids: IntArray  # [prompt tokens], at least one
    completion: TokenSequence
    candidate_ids: tuple[IntArray, ...] | None  # one per completion token

    @property
    def task(self) -> ScoringTask:
        """Input of the engine."""
        return ScoringTask(self.prompt_ids, self.completion.token_ids, self.candidate_ids)


class RequestTokenizer:
    """A teacher's tokenizer, its chat template and its table of token bytes.

    Raises:
        DataError: if single tokens of the tokenizer have no bytes.
        ConfigError: if the chat template cannot render a user and an assistant message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._chat = tokenizer
        self.files = tokenizer_files(tokenizer)
        # The served file is the one in use. The copy is also thread-safe: the Hugging Face wrapper
        # changes settings of its tokenizer on every call.
        self._tokenizer = Tokenizer.from_str(self.files[TOKENIZER_FILE])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.table = TokenTable.from_tokenizer(self._tokenizer, _roles(tokenizer, self._tokenizer))
        self._completions = TextEncoder(self._tokenizer, self.table)

    @property
    def renders_messages(self) -> bool:
        """True if there is a chat template."""
        return bool(self._chat.chat_template)

    @property
    def template_hash(self) -> str | None:
        """Hash of the chat template, 32 hex digits."""
        template = self._chat.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def tokenize(self, sequence: SequenceRequest) -> TokenizedSequence:
        """Convert a sequence to this teacher's tokens.

        Raises:
            ServiceError: if this teacher lacks an id, control token, role or end-of-turn token.
        """
        prompt_ids = self._prompt_ids(sequence)
        if not prompt_ids:
            raise invalid_field(
                "prompt",
                "the prompt has no tokens, so that nothing predicts the first completion token "
                "(expected at least one, such as the beginning-of-text token)",
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
            for message in sequence.messages:
                _require_unicode("messages", message.role + message.content)
            # The rendered text contains the special tokens.
            return encode_text(self._tokenizer, self._render(sequence.messages))
        assert sequence.prompt is not None
        _require_unicode("prompt", sequence.prompt)
        begin = [] if self.table.roles.bos is None else [self.table.roles.bos]
        return encode_prompt(self._tokenizer, sequence.prompt) or begin

    def _render(self, messages: Sequence[Message]) -> str:
        if not self.renders_messages:
            raise invalid_field(
                "messages",
                "this teacher has no chat template (expected prompt or prompt_token_ids)",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        try:
            rendered = self._chat.apply_chat_template(
                [message.model_dump() for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise invalid_field(
                "messages",
                f"this teacher's chat template does not support the roles {roles}: {error}",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _completion_ids(self, sequence: SequenceRequest) -> list[int]:
        if sequence.completion_token_ids is not None:
            self._require_known("completion_token_ids", sequence.completion_token_ids)
            ids = sequence.completion_token_ids
        else:
            ids = self._encode(_parts(sequence))
        return [*ids, self._end_of_turn(ids)] if sequence.finished else ids

    def _encode(self, parts: Sequence[str | ControlToken]) -> list[int]:
        """Encode adjacent texts as one text: only control tokens are boundaries."""
        ids: list[int] = []
        for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                text = "".join(part for part in group if isinstance(part, str))
                _require_unicode("completion", text)
                ids += self._completions.encode(text)
            else:
                ids += [self._control(part) for part in group if isinstance(part, ControlToken)]
        return ids

    def _control(self, part: ControlToken) -> int:
        if part.control not in self.table.controls:
            known = ", ".join(sorted(self.table.controls)[:16]) or "none"
            raise invalid_field(
                "completion",
                f"control token not found in this teacher's tokenizer (found "
                f"{part.control!r}, expected one of {known})",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        return self.table.controls[part.control]

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        end_of_turn = self.table.roles.end_of_turn
        if end_of_turn is None:
            raise invalid_field(
                "finished",
                "this teacher has no end-of-turn token (found true, expected false)",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        if ids and ids[-1] in self.table.roles.ending:
            raise invalid_field(
                "finished",
                f"the completion already ends with end-of-turn token {ids[-1]}, and "
                "finished: true would append another. Remove the token from the completion.",
            )
        return end_of_turn

    def _candidate_ids(
        self, sequence: SequenceRequest, completion_tokens: int
    ) -> tuple[IntArray, ...] | None:
        rows = sequence.candidate_ids
        if rows is None:
            return None
        if len(rows) != completion_tokens:
            raise invalid_field(
                "candidate_ids",
                f"wrong number of rows (found {len(rows)}, expected "
                f"{completion_tokens}: one per completion token of this teacher, the end-of-turn "
                "token included)",
            )
        self._require_known("candidate_ids", list(chain.from_iterable(rows)))
        return tuple(np.array(list(dict.fromkeys(row)), dtype=np.int32) for row in rows)

    def _require_known(self, field: str, ids: Sequence[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self.table.size:  # checked first: such an id may overflow an array
            raise invalid_field(
                field,
                f"id outside this teacher's vocabulary (found {highest}, expected less "
                f"than {self.table.size}). Send text instead of the ids of another tokenizer.",
            )
        try:
            self.table.require_known(np.array(ids, dtype=np.int64))
        except DataError as error:
            raise ServiceError(HTTPStatus.BAD_REQUEST, f"{field}: {error}", key=field) from error


def _roles(chat: PreTrainedTokenizerFast, tokenizer: Tokenizer) -> TokenRoles:
    try:
        # The ids are attributes made at run time, unknown to type checkers.
        return roles_of(cast(ChatTokenizer, chat), control_tokens(tokenizer_json(tokenizer)))
    except TemplateError as error:
        raise ConfigError(
            f"chat template: rendering a conversation failed: {error} (expected a template for "
            "messages of the roles user and assistant)",
            key="chat_template",
        ) from error


def _require_unicode(field: str, text: str) -> None:
    """Reject lone surrogates, which JSON can encode and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            field,
            f"invalid Unicode (found the lone surrogate {text[error.start]!a} at character "
            f"{error.start})",
        ) from error


def _parts(sequence: SequenceRequest) -> Sequence[str | ControlToken]:
    completion = sequence.completion
    assert completion is not None
    return [completion] if isinstance(completion, str) else completion
