"""``TokenizerFiles``: a student's tokenizer as saved files, reloaded once before they are used."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.pretrained import reload_differences, save_exact

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer in a model folder."""

    contents: Mapping[str, bytes]
    """Path in the folder -> content."""
    differences: tuple[str, ...]
    """Result of ``reload_differences``; empty for the same tokenizer."""

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
    ) -> "TokenizerFiles":
        """Save a tokenizer with the config of a model in a temporary folder, and reload it."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            model_config.save_pretrained(folder)
            others = {path.name for path in folder.iterdir()}
            differences = save_exact(tokenizer, folder, AutoTokenizer.from_pretrained)
            contents = {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*"))
                if path.is_file() and path.name not in others
            }
        return cls(contents, tuple(differences))

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def require_reloadable(self) -> None:
        """Raise ConfigError unless the saved tokenizer reloads as the same one."""
        if self.differences:
            raise ConfigError(
                "student.model: the saved tokenizer would reload as another one in transformers "
                f"and vLLM (different: {', '.join(self.differences)}). Use another release of "
                "transformers, or a model whose model_type supports this tokenizer.",
                key="student.model",
            )


def warn_about_reload(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Reload the tokenizer of a saved folder; log a warning if another one is loaded."""
    differences = reload_differences(tokenizer, AutoTokenizer.from_pretrained, folder)
    if differences:
        logger.warning(
            "%s: AutoTokenizer of transformers loads another tokenizer than the trained one "
            "(different: %s). Load it with PreTrainedTokenizerFast.",
            folder,
            ", ".join(differences),
        )
