"""``PretrainedTokenizer``: tokenizer and chat template of a model folder or a hub model.

For teachers that do not send their tokenizer: in-process teachers and stock vLLM servers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_protocol.errors import ConfigError, DataError, MissingPackageError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of

_FILE = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class PretrainedTokenizer(TeacherTokenizer):
    """A ``TeacherTokenizer`` with the chat template of its transformers tokenizer."""

    chat: Any  # PreTrainedTokenizerFast, which is imported only where it is used

    @classmethod
    def wrap(cls, chat: Any) -> "PretrainedTokenizer":
        """Wrap a ``PreTrainedTokenizerFast``.

        Raises:
            ConfigError: if the chat template fails to render a user and an assistant message.
            DataError: if the tokens' bytes cannot be derived from the tokenizer.
        """
        from jinja2 import TemplateError

        # A copy, because transformers changes truncation and padding of its tokenizer per call.
        tokenizer = Tokenizer.from_str(chat.backend_tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        try:
            roles = roles_of(chat, control_tokens(tokenizer_json(tokenizer)))
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"invalid chat template: {error}", key="chat_template") from error
        table = TokenTable.from_tokenizer(tokenizer, roles)
        return cls(tokenizer, table, TextEncoder(tokenizer, table), chat)

    @property
    def has_chat_template(self) -> bool:
        """True if messages can be rendered."""
        return bool(self.chat.chat_template)

    @property
    def chat_template_hash(self) -> str | None:
        """32 hex digits of the chat template, equal to a mopd service's."""
        template = self.chat.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render messages with the chat template, up to the start of the assistant's turn.

        Raises:
            DataError: if there is no chat template, or it rejects the messages.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise DataError(
                "chat template not found in the tokenizer (messages need one). Use prompt or "
                "prompt_token_ids",
                key="messages",
            )
        try:
            return self.chat.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"chat template rejects messages with the roles {roles}: {error}", key="messages"
            ) from error


def load_tokenizer(source: str, revision: str | None = None) -> PretrainedTokenizer:
    """Load the tokenizer of a model folder, or of a model on the hub.

    Raises:
        ConfigError: if the folder or model is not found or has no fast tokenizer.
        MissingPackageError: if transformers is not installed.
        DataError: if the tokens' bytes cannot be derived from the tokenizer.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        # Without a tokenizer.json, transformers would make an empty tokenizer of the model's type.
        if not (folder / _FILE).is_file():
            raise ConfigError(f"{_FILE} not found in {source!r}", key="tokenizer")
    elif folder.is_absolute() or source.startswith((".", "~")) or len(folder.parts) != 2:
        raise ConfigError(
            f"tokenizer folder {source!r} not found (expected a folder or a hub id)",
            key="tokenizer",
        )
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingPackageError(
            f"loading the tokenizer of {source!r} needs transformers. Run pip install transformers",
            key="transformers",
        ) from error
    try:
        chat: object = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else source, revision=revision
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"tokenizer of {source!r} cannot be loaded: {reason}", key="tokenizer"
        ) from error
    if not isinstance(chat, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer of {source!r} is unsupported (found {type(chat).__name__}, expected a fast "
            f"tokenizer with a {_FILE})",
            key="tokenizer",
        )
    return PretrainedTokenizer.wrap(chat)
