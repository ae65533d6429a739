"""Loads a model's tokenizer and writes down the files from which the other side can load it."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mopd_protocol.errors import ConfigError
from mopd_server.settings import TeacherSettings

TOKENIZER_FILE = "tokenizer.json"

#: What tokenizers are read from: the fast file itself, or one that is converted to it.
_VOCABULARY_PATTERNS = (TOKENIZER_FILE, "vocab.*", "*.model", "*.tiktoken")

_TEXT_SUFFIXES = (".json", ".jinja", ".txt")


def load_tokenizer(settings: TeacherSettings) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a model folder or hub id.

    Raises:
        ConfigError: when there is none.
    """
    _require_model(settings.model)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
        )
    except Exception as error:  # the tokenizers library raises the bare class
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot load the tokenizer of {settings.model!r}: {first_line}; "
            f"expected an existing folder or a hub id with a {TOKENIZER_FILE}"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer of {settings.model!r} is a {type(tokenizer).__name__}, which is not a "
            f"fast tokenizer; expected one with a {TOKENIZER_FILE}"
        )
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerFast) -> Mapping[str, str]:
    """File name -> text of everything that ``AutoTokenizer.from_pretrained`` reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TEXT_SUFFIXES
        }


def _require_model(model: str) -> None:
    """A path that does not exist is told apart from a hub id before anything asks the network."""
    path = Path(model).expanduser()
    if path.is_dir():
        # transformers would make an empty tokenizer out of the model's type.
        if not any(any(path.glob(pattern)) for pattern in _VOCABULARY_PATTERNS):
            raise ConfigError(
                f"model folder {model!r} holds no tokenizer; expected a {TOKENIZER_FILE}"
            )
        return
    if path.is_file():
        raise ConfigError(f"model {model!r} is a file; expected a folder or a hub id")
    if path.is_absolute() or model.startswith((".", "~")) or len(path.parts) > 2:
        raise ConfigError(f"there is no model folder {model!r}; expected a folder or a hub id")
