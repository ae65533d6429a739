"""Convert the prompts and completions of requests to the tokens of a teacher.

Services, in-process teachers and the client of a stock vLLM server share this conversion. Prompt
and completion are tokenized separately, so that a token boundary lies between the two.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mopd_protocol.arrays import IntArray
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.messages import Message, Tool, template_messages, template_tools
from mopd_protocol.requests import ControlToken, SequenceRequest
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import (
    TextEncoder,
    TokenTable,
    control_tokens,
    encode_prompt,
    encode_text,
)
from mopd_protocol.tokenizers.tokenizer_file import naming_tokenizer, tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of

#: Longer texts are first tokenized in pieces, which takes 20 ms each, if a limit is known.
_LONG_CHARACTERS = 256 * 1024
_PIECE_CHARACTERS = 32 * 1024
#: Rows of candidates that are validated in one call.
_ROWS = 64


@dataclass(frozen=True, eq=False)
class TokenizedSequence:
    """A valid sequence of a request in the teacher's tokens."""

    prompt_ids: IntArray  # [prompt tokens], at least one
    completion: TokenSequence
    candidate_ids: tuple[IntArray, ...] | None  # one per completion token, without repetitions

    @property
    def token_ids(self) -> list[int]:
        """Ids of prompt and completion."""
        return [*self.prompt_ids.tolist(), *self.completion.token_ids.tolist()]

    def require_length(self, longest: int) -> None:
        """Check the number of tokens.

        Raises:
            TeacherError: with status 413, if there are more than ``longest``.
        """
        prompt, completion = len(self.prompt_ids), len(self.completion)
        if prompt + completion > longest:
            length = (
                f"found {prompt + completion} tokens, {prompt} of prompt and {completion} of "
                "completion"
            )
            raise _too_long(length, longest)


@dataclass(frozen=True, eq=False)
class TeacherTokenizer:
    """A teacher's tokenizer, the bytes of its tokens, and its encoder of completions."""

    tokenizer: Tokenizer
    table: TokenTable
    encoder: TextEncoder

    def completion(self, sequence: SequenceRequest) -> TokenSequence:
        """Tokenize the completion.

        Raises:
            TeacherError: with the field as key, on an unknown id or control token, invalid Unicode,
                or a missing or repeated end-of-turn token.
        """
        if sequence.completion_token_ids is not None:
            self._require_known("completion_token_ids", sequence.completion_token_ids)
            ids = sequence.completion_token_ids
        else:
            ids = self._encode(sequence.completion_parts)
        return self.table.sequence([*ids, self._end_of_turn(ids)] if sequence.finished else ids)

    def _encode(self, parts: Sequence[str | ControlToken]) -> list[int]:
        """Encode adjacent texts as one text: only control tokens are boundaries."""
        ids: list[int] = []
        for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                text = "".join(part for part in group if isinstance(part, str))
                _require_unicode("completion", text)
                ids += self.encoder.encode(text)
            else:
                ids += [self._control(part) for part in group if isinstance(part, ControlToken)]
        return ids

    def _control(self, part: ControlToken) -> int:
        if part.control not in self.table.controls:
            known = ", ".join(sorted(self.table.controls)[:16]) or "none"
            raise _invalid(
                "completion",
                f"control token not found in this teacher's tokenizer (found "
                f"{part.control!r}, expected one of {known})",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        return self.table.controls[part.control]

    def _end_of_turn(self, ids: Sequence[int]) -> int:
        end_of_turn = self.table.roles.end_of_turn
        if end_of_turn is None:
            raise _invalid(
                "finished",
                "this teacher has no end-of-turn token (found true, expected false)",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        if ids and ids[-1] in self.table.roles.ending:
            raise _invalid(
                "finished",
                f"the completion already ends with end-of-turn token {ids[-1]}, and "
                "finished: true would append another. Remove the token from the completion.",
            )
        return end_of_turn

    def _require_known(self, field: str, ids: Sequence[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self.table.size:  # checked first: such an id may overflow an array
            raise _invalid(
                field,
                f"id outside this teacher's vocabulary (found {highest}, expected less "
                f"than {self.table.size}). Send text instead of the ids of another tokenizer.",
            )
        try:
            self.table.require_known(np.array(ids, dtype=np.int64))
        except DataError as error:
            raise _invalid(field, str(error)) from error


@dataclass(frozen=True, eq=False)
class RequestTokenizer(TeacherTokenizer):
    """A ``TeacherTokenizer`` with the chat template of its transformers tokenizer."""

    chat: Any  # PreTrainedTokenizerFast; transformers is imported only where it is used

    @classmethod
    def wrap(
        cls, chat: Any, tokenizer_file: str | None = None, *, ends: Collection[int] = ()
    ) -> "RequestTokenizer":
        """Wrap a ``PreTrainedTokenizerFast``.

        Args:
            tokenizer_file: its ``tokenizer.json``, if that is at hand.
            ends: the ids of ``published_ends``.

        Raises:
            ConfigError: if the chat template fails to render a user and an assistant message.
            TokenizerError: if the tokens' bytes cannot be derived from the tokenizer.
        """
        # A copy, because transformers changes truncation and padding of its tokenizer per call.
        tokenizer = Tokenizer.from_str(tokenizer_file or chat.backend_tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        controls = control_tokens(tokenizer_json(tokenizer))
        try:
            roles = roles_of(chat, controls, ends)
        except Exception as error:  # a template may raise any
            raise ConfigError(
                f"chat template: rendering a conversation failed: {error} (expected a template for "
                "messages of the roles user and assistant)",
                key="chat_template",
            ) from error
        with naming_tokenizer(chat.name_or_path or "tokenizer"):
            table = TokenTable.from_tokenizer(tokenizer, roles)
        return cls(tokenizer, table, TextEncoder(tokenizer, table), chat)

    @property
    def has_chat_template(self) -> bool:
        """True if messages can be rendered."""
        return bool(self.chat.chat_template)

    @property
    def chat_template_hash(self) -> str | None:
        """Hash of the chat template, 32 hex digits."""
        template = self.chat.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def tokenize(
        self,
        sequence: SequenceRequest,
        *,
        prompt_ids: IntArray | None = None,
        max_tokens: int | None = None,
    ) -> TokenizedSequence:
        """Convert a sequence to this teacher's tokens.

        Args:
            prompt_ids: tokens of its prompt, if those are known.
            max_tokens: a prompt or completion that is far longer is rejected early.

        Raises:
            TeacherError: as ``completion``, or if the messages cannot be rendered, the prompt has
                no tokens, or the candidates are invalid.
        """
        if max_tokens is not None:
            self._require_tokens(sequence, max_tokens)
        if prompt_ids is None:
            prompt_ids = np.array(self._prompt_ids(sequence), dtype=np.int32)
        if not len(prompt_ids):
            raise _invalid(
                "prompt",
                "the prompt has no tokens, so that nothing predicts the first completion token "
                "(expected at least one, such as the beginning-of-text token)",
            )
        completion = self.completion(sequence)
        return TokenizedSequence(
            prompt_ids=prompt_ids,
            completion=completion,
            candidate_ids=self._candidate_ids(sequence, len(completion)),
        )

    def _require_tokens(self, sequence: SequenceRequest, max_tokens: int) -> None:
        """Reject lists and texts of far more tokens before the work that these would take.

        Freeing the tokens of a text of megabytes keeps the interpreter's lock for seconds.
        """
        for ids in (sequence.prompt_token_ids, sequence.completion_token_ids):
            if ids is not None and len(ids) > max_tokens:
                raise _too_long(f"found {len(ids)} tokens", max_tokens)
        for texts in (sequence.prompt_texts, sequence.completion_texts):
            if sum(map(len, texts)) > _LONG_CHARACTERS:
                self._require_text(texts, max_tokens)

    def _require_text(self, texts: Sequence[str], max_tokens: int) -> None:
        """Count the tokens of pieces; where a text is cut changes this by less than a half."""
        tokens = 0
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS].encode(errors="replace").decode()
                [encoding] = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                tokens += len(encoding)
                if tokens > 2 * max_tokens:
                    raise _too_long(f"found more than {tokens // 2} tokens", max_tokens)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Tool] = (),
    ) -> str:
        """Render messages with the chat template, up to the start of the assistant's turn.

        Args:
            variables: of the template.
            tools: JSON schemas.

        Raises:
            TeacherError: if there is no chat template, or it rejects the messages.
        """
        if not self.has_chat_template:
            raise _invalid(
                "messages",
                "this teacher has no chat template (expected prompt or prompt_token_ids)",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            )
        try:
            template = self.chat.chat_template
            return self.chat.apply_chat_template(
                template_messages(messages, template),
                tokenize=False,
                add_generation_prompt=True,
                **{**template_tools(tools, template), **variables},
            )
        except Exception as error:  # a template may raise any
            roles = ", ".join(message.role for message in messages)
            raise _invalid(
                "messages",
                "this teacher's chat template does not support the roles "
                f"{roles}{' with tools' if tools else ''}: {error}",
                HTTPStatus.UNPROCESSABLE_ENTITY,
            ) from error

    def _prompt_ids(self, sequence: SequenceRequest) -> list[int]:
        if sequence.prompt_token_ids is not None:
            self._require_known("prompt_token_ids", sequence.prompt_token_ids)
            return sequence.prompt_token_ids
        if sequence.messages is not None:
            for text in sequence.prompt_texts:
                _require_unicode("messages", text)
            # The rendered text contains the special tokens.
            variables = sequence.chat_template_kwargs or {}
            rendered = self.render(sequence.messages, variables, sequence.tools or ())
            return encode_text(self.tokenizer, rendered)
        assert sequence.prompt is not None
        _require_unicode("prompt", sequence.prompt)
        begin = [] if self.table.roles.bos is None else [self.table.roles.bos]
        return encode_prompt(self.tokenizer, sequence.prompt) or begin

    def _candidate_ids(
        self, sequence: SequenceRequest, completion_tokens: int
    ) -> tuple[IntArray, ...] | None:
        rows = sequence.candidate_ids
        if rows is None:
            return None
        if len(rows) != completion_tokens:
            raise _invalid(
                "candidate_ids",
                f"wrong number of rows (found {len(rows)}, expected "
                f"{completion_tokens}: one per completion token of this teacher, the end-of-turn "
                "token included)",
            )
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS]
            self._require_known("candidate_ids", list(chain.from_iterable(block)))
        return tuple(np.array(list(dict.fromkeys(row)), dtype=np.int32) for row in rows)


def _require_unicode(field: str, text: str) -> None:
    """Reject lone surrogates, which JSON can encode and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(
            field,
            f"invalid Unicode (found the lone surrogate {text[error.start]!a} at character "
            f"{error.start})",
        ) from error


def _too_long(length: str, longest: int) -> TeacherError:
    return TeacherError(
        f"the sequence is too long ({length}, expected at most {longest}: max_model_len in the "
        "manifest of this teacher)",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        key="max_model_len",
    )


def _invalid(field: str, problem: str, status: int = HTTPStatus.BAD_REQUEST) -> TeacherError:
    return TeacherError(f"{field}: {problem}", status=status, key=field)
