"""``FolderTokenizer``: a model's tokenizer and chat template, read from its files without torch.

For teachers that do not hand out their tokenizer: the files of the model are read on this side.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mopd_client.tokenizers.chat_template import ChatTemplate
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"

#: The names under which templates know special tokens.
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class FolderTokenizer:
    """A fast tokenizer with its chat template and its table of token bytes.

    Args:
        texts: file name -> text, of the files above that there are.

    Raises:
        ConfigError: when there is no fast tokenizer among them, or the template is none.
        DataError: for a tokenizer whose tokens do not spell bytes by themselves.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(texts[TOKENIZER])
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"{TOKENIZER} is no fast tokenizer: {error}") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        config = _object(texts.get(CONFIG), CONFIG)
        named = _object(texts.get(SPECIAL_TOKENS), SPECIAL_TOKENS)
        if "added_tokens_decoder" not in config:  # the older layout, where the map decides
            config = {**config, **named}
        self.special_tokens = _special_tokens(config)
        text = texts.get(TEMPLATE) or _default_template(config.get("chat_template"))
        self.template = None if text is None else ChatTemplate(text, self.special_tokens)
        controls = control_tokens(tokenizer_json(self.tokenizer))
        self.table = TokenTable.from_tokenizer(self.tokenizer, roles_of(self, controls))
        self.encoder = TextEncoder(self.tokenizer, self.table)

    @property
    def chat_template(self) -> str | None:
        """The template's text."""
        return None if self.template is None else self.template.text

    @property
    def chat_template_hash(self) -> str | None:
        """32 hex digits of the template, as a mopd service computes them."""
        text = self.chat_template
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, where the files name one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, where the files name one."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of padding, where the files name one."""
        return self._named_id("pad_token")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text; there must be a template."""
        assert self.template is not None
        assert not tokenize
        return self.template.render(conversation, add_generation_prompt=add_generation_prompt)

    def _named_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self.tokenizer.token_to_id(content)


def read_folder_tokenizer(source: str, revision: str | None = None) -> FolderTokenizer:
    """The tokenizer of a model folder, or of a model on the hub.

    Raises:
        ConfigError: when there is no such folder or model, or no fast tokenizer in it.
        DataError: for a tokenizer whose tokens do not spell bytes by themselves.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        paths = {name: folder / name for name in (TOKENIZER, CONFIG, TEMPLATE, SPECIAL_TOKENS)}
    elif folder.is_absolute() or source.startswith((".", "~")) or len(folder.parts) != 2:
        raise ConfigError(f"there is no tokenizer folder {source!r}; expected a folder or a hub id")
    else:
        paths = _from_hub(source, revision)
    texts = {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}
    if TOKENIZER not in texts:
        raise ConfigError(
            f"{source!r} holds no {TOKENIZER}; expected a model with a fast tokenizer"
        )
    return FolderTokenizer(texts)


def _from_hub(source: str, revision: str | None) -> dict[str, Path]:
    # Comes with tokenizers; slow to import, and most teachers need no hub.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    found: dict[str, Path] = {}
    for name in (TOKENIZER, CONFIG, TEMPLATE, SPECIAL_TOKENS):
        try:
            found[name] = Path(hf_hub_download(source, name, revision=revision))
        except EntryNotFoundError:
            continue
        except Exception as error:  # no network, no such model, no access: as many classes
            raise ConfigError(
                f"cannot load {name} of {source!r} from the hub: {error}; expected a folder with a "
                f"{TOKENIZER}, or a hub id"
            ) from error
    return found


def _object(text: str | None, name: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is a {type(values).__name__}, expected a JSON object")
    return values  # pyright: ignore[reportUnknownVariableType]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; files write a token as its text, or as an object with its content."""
    found: dict[str, str] = {}
    for name in (f"{name}_token" for name in _NAMED):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _default_template(template: Any) -> str | None:
    """The template of a ``tokenizer_config.json``: a text, or several by name."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
