"""LoRA adapters as teachers on one base model: ``NAME=FOLDER``, in the format of peft."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.model_revision import folder_name, hash_of_weights

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Tensors of embeddings and heads, by the names of the common architectures.
_HEAD = re.compile(r"\b(lm_head|embed_tokens|embed_out|embed_in|wte)\b")
#: A name is a part of the teacher's address.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Adapter:
    """One adapter; validated by ``load_adapters``."""

    name: str
    folder: Path
    hash: str  # of its configuration and weights
    rank: int
    adapts_head: bool
    """True if it changes the embeddings or the head."""

    def model(self, base: str) -> str:
        """Return the name of the model in the manifest: independent of paths."""
        return f"{base}+{folder_name(str(self.folder))}"

    def revision(self, base: str) -> str:
        """Return a hash of the base model's revision and the adapter."""
        return hashlib.sha256(f"{base}:{self.hash}".encode()).hexdigest()[:32]


def load_adapters(pairs: Sequence[str]) -> tuple[Adapter, ...]:
    """Return the adapters of ``NAME=FOLDER`` arguments; their weights are not loaded.

    Raises:
        ConfigError: if a name is invalid or repeated, or a folder contains no LoRA adapter.
    """
    adapters: dict[str, Adapter] = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if not _NAME.fullmatch(name) or name in adapters:
            problem = "repeated" if name in adapters else "invalid"
            raise ConfigError(
                f"--adapter: {problem} name (found {pair!r}, expected NAME=FOLDER with a unique "
                "name of letters, digits, '_', '.' and '-')",
                key="adapter",
            )
        adapters[name] = _adapter(name, Path(path).expanduser())
    return tuple(adapters.values())


def _adapter(name: str, folder: Path) -> Adapter:
    try:
        config = json.loads((folder / _CONFIG).read_text())
        kind, rank = config["peft_type"], int(config["r"])
        ranks = [rank, *map(int, (config.get("rank_pattern") or {}).values())]
        with safe_open(folder / _WEIGHTS, framework="numpy") as weights:
            adapts_head = any(map(_HEAD.search, weights.keys()))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _invalid(name, folder, str(error)) from error
    if kind != "LORA":
        raise _invalid(name, folder, f"peft_type {kind}")
    return Adapter(name, folder, hash_of_weights(folder, config=_CONFIG), max(ranks), adapts_head)


def _invalid(name: str, folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"--adapter: {name!r} is not a LoRA adapter (found {str(folder)!r}: {problem}, expected a "
        f"folder with {_CONFIG} and {_WEIGHTS}, as saved by peft or "
        "student.lora)",
        key="adapter",
    )
