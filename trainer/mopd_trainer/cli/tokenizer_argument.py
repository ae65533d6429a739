"""``NamedTokenizer``: a tokenizer that a command was told of by folder, hub id, file or URL."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mopd_client.sync import SyncTeacherClient
from mopd_client.teacher_client import ClientOptions
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenRoles, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
#: ``owner/name``, or a name alone; not what looks like a file.
_HUB_ID = re.compile(r"(?!.*\.json$)[\w-][\w.-]*(/[\w.-]+)?")
#: For one question to a running teacher, with all its retries.
_DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, eq=False)
class NamedTokenizer:
    """The bytes of its tokens, its form for completions, and the width of its model's head."""

    name: str
    table: TokenTable
    encoder: TextEncoder
    logit_width: int
    """Rows of the head; the tokenizer's size where no model says otherwise."""

    def __post_init__(self) -> None:
        self.table.real_ids(self.logit_width)  # refuses the tokenizer of a larger model

    @property
    def summary(self) -> str:
        """Who it is, in a line."""
        return (
            f"{self.name}: {self.table.size:,} ids, head of {self.logit_width:,} rows, "
            f"tokenizer {self.table.fingerprint[:12]}"
        )


def read_tokenizer(name: str, *, api_key_env: str | None = None) -> NamedTokenizer:
    """The tokenizer at a running teacher's URL, in a ``tokenizer.json``, or of a model.

    A ``tokenizer.json`` without a ``tokenizer_config.json`` beside it tells no roles: its control
    tokens meet others by name alone.

    Args:
        api_key_env: the environment variable with the key that a teacher asks for.

    Raises:
        ConfigError: when there is none, or it is of no use.
        DataError: when its tokens do not spell bytes, or the model's head is too narrow for it.
        TeacherError: when a teacher does not answer.
    """
    if name.startswith(("http://", "https://")):
        return _of_teacher(name, _api_key(api_key_env))
    path = Path(name)
    if path.is_file():
        if not (path.parent / "tokenizer_config.json").exists() or path.name != "tokenizer.json":
            return _of_file(path)
        return _of_model(name, str(path.parent))
    if path.is_dir() and not any((path / file).exists() for file in _TOKENIZER_FILES):
        raise ConfigError(f"{name} holds no tokenizer; expected {' or '.join(_TOKENIZER_FILES)}")
    if not path.exists() and not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{name}: no such file or folder; expected a model folder, a hub id, a tokenizer.json "
            "or a teacher's http:// address"
        )
    return _of_model(name, name)


def _of_teacher(url: str, api_key: str | None) -> NamedTokenizer:
    options = ClientOptions(api_key=api_key, deadline_seconds=_DEADLINE_SECONDS)
    with SyncTeacherClient(url, name=url, **options) as teacher:
        manifest, found = teacher.handshake(), teacher.tokenizer()
    return NamedTokenizer(url, found.table, found.encoder, manifest.logit_width)


def _of_file(path: Path) -> NamedTokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(f"{path} is not a fast tokenizer's JSON: {error}") from error
    table = TokenTable.from_tokenizer(tokenizer, TokenRoles())
    return NamedTokenizer(str(path), table, TextEncoder(tokenizer, table), table.size)


def _of_model(name: str, model: str) -> NamedTokenizer:
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"tokenizer of {name!r} cannot be loaded: {_reason(error)}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{name!r} has a slow tokenizer; expected a tokenizer.json")
    backend: Tokenizer = tokenizer.backend_tokenizer
    description = tokenizer_json(backend)
    try:
        roles = roles_of(tokenizer, control_tokens(description))
    except TemplateError as error:
        raise ConfigError(
            f"the chat template of {name!r} cannot render a question and an answer: {error}"
        ) from error
    table = TokenTable.from_json(description, roles)
    try:
        width: int = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    except (OSError, ValueError):  # a tokenizer without a model
        width = table.size
    return NamedTokenizer(name, table, TextEncoder(backend, table), width)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the API key is taken from {variable}, which is not set")
    return key
