"""Loading of a model's tokenizer, and the files from which the client loads the same one."""

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from mopd_protocol.errors import ConfigError, first_line
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.tokenizers.pretrained import load_exact
from mopd_protocol.tokenizers.published_ends import published_ends
from mopd_server.settings import TeacherSettings

_TOKENIZER_FILE = "tokenizer.json"

#: Files of a tokenizer: the fast one, or one that transformers converts.
_VOCABULARY_PATTERNS = (_TOKENIZER_FILE, "vocab.*", "*.model", "*.tiktoken")

_TEXT_SUFFIXES = (".json", ".jinja", ".txt")


@dataclass(frozen=True, eq=False)
class ServedTokenizer:
    """The tokenizer of requests, and its files: file name -> text."""

    requests: RequestTokenizer
    files: Mapping[str, str]

    @classmethod
    def read(cls, settings: TeacherSettings) -> "ServedTokenizer":
        """Load the tokenizer of a model, and which of its tokens end a completion.

        Raises:
            ConfigError: as ``load_tokenizer`` and ``of``.
            TokenizerError: as ``of``.
        """
        chat = load_tokenizer(settings)
        return cls.of(chat, published_ends(cached_file, settings.model, settings.revision))

    @classmethod
    def of(cls, chat: PreTrainedTokenizerFast, ends: Collection[int] = ()) -> "ServedTokenizer":
        """Use the served ``tokenizer.json`` for requests, too.

        Args:
            ends: the ids of ``published_ends``.

        Raises:
            ConfigError: if the chat template cannot render a user and an assistant message.
            TokenizerError: if single tokens of the tokenizer have no bytes.
        """
        files = _files(chat)
        return cls(RequestTokenizer.wrap(chat, files[_TOKENIZER_FILE], ends=ends), files)


def load_tokenizer(settings: TeacherSettings) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer of a model folder or hub id.

    Raises:
        ConfigError: if there is none.
    """
    model = settings.model
    _require_model(model)
    try:
        tokenizer: PreTrainedTokenizerBase = load_exact(
            AutoTokenizer.from_pretrained,
            PreTrainedTokenizerFast.from_pretrained,
            model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
    except Exception as error:  # the tokenizers library raises the base class
        raise ConfigError(
            f"model {model!r}: loading the tokenizer failed: {first_line(error)} (expected an "
            f"existing folder or a hub id with a {_TOKENIZER_FILE})",
            key="model",
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"model {model!r}: not a fast tokenizer (found {type(tokenizer).__name__}, expected "
            f"one with a {_TOKENIZER_FILE})",
            key="model",
        )
    return tokenizer


def _files(tokenizer: PreTrainedTokenizerFast) -> Mapping[str, str]:
    """Return file name -> text of all files for ``AutoTokenizer.from_pretrained``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TEXT_SUFFIXES
        }


def _require_model(model: str) -> None:
    """Distinguish a missing path from a hub id before any network access."""
    path = Path(model).expanduser()
    expected = "a model folder or a hub id"
    if path.is_dir():
        # transformers would create an empty tokenizer from the model type.
        if any(any(path.glob(pattern)) for pattern in _VOCABULARY_PATTERNS):
            return
        problem, expected = "contains no tokenizer", f"a {_TOKENIZER_FILE}"
    elif path.is_file():
        problem = "is a file"
    elif path.is_absolute() or model.startswith((".", "~")) or len(path.parts) > 2:
        problem = "not found"
    else:
        return
    raise ConfigError(f"model {model!r}: {problem} (expected {expected})", key="model")
