"""Load the tokenizer and chat template of a model folder or a hub model.

For teachers that do not send their tokenizer: in-process teachers and stock vLLM servers.
"""

from pathlib import Path

from mopd_protocol.errors import ConfigError, MissingPackageError, first_line
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.runtime.model_revision import is_missing_folder
from mopd_protocol.tokenizers.pretrained import load_exact
from mopd_protocol.tokenizers.published_ends import published_ends

_FILE = "tokenizer.json"


def load_tokenizer(source: str, revision: str | None = None) -> RequestTokenizer:
    """Load the tokenizer of a model folder, or of a model on the hub.

    Raises:
        ConfigError: if the folder or model is not found or has no fast tokenizer.
        MissingPackageError: if transformers is not installed.
        TokenizerError: if the tokens' bytes cannot be derived from the tokenizer.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        # Without a tokenizer.json, transformers would make an empty tokenizer of the model's type.
        if not (folder / _FILE).is_file():
            raise ConfigError(f"{_FILE} not found in {source!r}", key="tokenizer")
    elif is_missing_folder(source):
        raise ConfigError(
            f"tokenizer folder {source!r} not found (expected a folder or a hub id)",
            key="tokenizer",
        )
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file
    except ImportError as error:
        raise MissingPackageError(
            f"loading the tokenizer of {source!r} needs transformers. Run pip install transformers",
            key="transformers",
        ) from error
    try:
        chat: object = load_exact(
            AutoTokenizer.from_pretrained,
            PreTrainedTokenizerFast.from_pretrained,
            str(folder) if folder.is_dir() else source,
            revision=revision,
        )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(
            f"tokenizer of {source!r} cannot be loaded: {first_line(error)}", key="tokenizer"
        ) from error
    if not isinstance(chat, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer of {source!r} is unsupported (found {type(chat).__name__}, expected a fast "
            f"tokenizer with a {_FILE})",
            key="tokenizer",
        )
    return RequestTokenizer.wrap(chat, ends=published_ends(cached_file, source, revision))
