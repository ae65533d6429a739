"""``load_tokenizer``: a tokenizer by model folder, hub name, file or teacher URL."""

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mopd_client.sync import SyncTeacherClient
from mopd_client.teacher_client import ClientOptions
from mopd_client.tokenizers.pretrained import load_tokenizer as pretrained_tokenizer
from mopd_client.transport.replica import ADDRESS_PREFIXES
from mopd_protocol.errors import ConfigError, TokenizerError
from mopd_protocol.runtime.model_config import vocabulary_size
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenRoles, TokenTable
from mopd_protocol.tokenizers.tokenizer_file import naming_tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json")
#: ``owner/name`` or a name, but no file name.
_HUB_NAME = re.compile(r"(?!.*\.json$)[\w-][\w.-]*(/[\w.-]+)?")
_DEADLINE_SECONDS = 30.0  # for a request to a teacher, including all retries

#: Visible form of a space.
SPACE = "␣"
_ESCAPES = {" ": SPACE, "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", SPACE: "\\u2423"}


@dataclass(frozen=True, eq=False)
class NamedTokenizer:
    """Token table, encoder and width of the model's head (the vocabulary size if unknown)."""

    name: str
    table: TokenTable
    encoder: TextEncoder
    logit_width: int

    def __post_init__(self) -> None:
        self.table.real_ids(self.logit_width)  # raises if the head is too narrow

    @property
    def summary(self) -> str:
        """Name, size, head and fingerprint in one line."""
        return (
            f"{self.name}: {self.table.size:,} ids, head of {self.logit_width:,} rows, "
            f"tokenizer {self.table.fingerprint[:12]}"
        )


def load_tokenizer(name: str, *, api_key_env: str | None = None) -> NamedTokenizer:
    """Load the tokenizer of a model folder, hub model, ``tokenizer.json`` or running teacher.

    A ``tokenizer.json`` without ``tokenizer_config.json`` has no roles; its control tokens are
    matched by name only.

    Args:
        api_key_env: environment variable with the API key of a teacher.

    Raises:
        ConfigError: if there is no such tokenizer, or the variable is not set.
        DataError: if tokens have no byte representation, or the head is too narrow.
        TeacherError: if a teacher is unreachable.
    """
    if name.startswith(ADDRESS_PREFIXES):
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise ConfigError(f"--api-key-env: {api_key_env} is not set", key=api_key_env)
        options = ClientOptions(api_key=key, deadline_seconds=_DEADLINE_SECONDS)
        with SyncTeacherClient(name, name=name, **options) as teacher:
            manifest, tokenizer = teacher.handshake(), teacher.tokenizer()
        return NamedTokenizer(name, tokenizer.table, tokenizer.encoder, manifest.logit_width)
    path = Path(name)
    if path.is_file():
        if path.name == _FILES[0] and (path.parent / _FILES[1]).exists():
            return _load_model_tokenizer(name, str(path.parent))
        return _load_file(path)
    if path.is_dir() and not any((path / file).exists() for file in _FILES):
        raise ConfigError(f"{name}: no tokenizer found, expected {' or '.join(_FILES)}", key=name)
    if not path.exists() and not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name}: not found, expected a model folder, a hub name, a tokenizer.json or the "
            "http:// URL of a teacher",
            key=name,
        )
    return _load_model_tokenizer(name, name)


def readable(spelling: bytes) -> str:
    """Return bytes as one line without spaces, in which different bytes look different.

    Partial characters are ``\\xe7``, invisible ones ``\\u200d``; a combining mark is escaped at the
    start of a token.
    """
    text = spelling.decode(errors="surrogateescape")
    return "".join(_visible(character, first=index == 0) for index, character in enumerate(text))


def _visible(character: str, *, first: bool) -> str:
    code = ord(character)
    if character in _ESCAPES:
        return _ESCAPES[character]
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte outside any character
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable() and not (first and unicodedata.category(character)[0] == "M"):
        return character
    return f"\\x{code:02x}" if code < 0x80 else character.encode("unicode_escape").decode()


def _load_file(path: Path) -> NamedTokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(
            f"{path}: invalid JSON of a fast tokenizer: {error}", key=str(path)
        ) from error
    with naming_tokenizer(str(path)):
        table = TokenTable.from_tokenizer(tokenizer, TokenRoles())
    return NamedTokenizer(str(path), table, TextEncoder(tokenizer, table), table.size)


def _load_model_tokenizer(name: str, model: str) -> NamedTokenizer:
    from transformers import AutoConfig

    pretrained = pretrained_tokenizer(model)
    try:
        width = vocabulary_size(AutoConfig.from_pretrained(model))
    except (OSError, ValueError):  # a tokenizer without a model
        width = None
    width = pretrained.table.size if width is None else width
    return NamedTokenizer(name, pretrained.table, pretrained.encoder, width)
