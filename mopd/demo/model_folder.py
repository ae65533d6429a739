"""A trained model as an ordinary Hugging Face folder that appears whole or not at all."""

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mopd.demo.recipes import Recipe
from mopd_protocol.runtime.atomic_file import replacing_folder

_KEY_FILE = "demo_recipe.json"


def is_cached(recipe: Recipe, folder: Path) -> bool:
    """Whether ``folder`` holds a model of exactly this recipe."""
    key_file = folder / _KEY_FILE
    if not key_file.is_file():
        return False
    return json.loads(key_file.read_text())["cache_key"] == recipe.cache_key()


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, folder: Path
) -> None:
    """Writes the folder under a temporary name beside it, then renames it into place."""
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / _KEY_FILE).write_text(json.dumps({"cache_key": recipe.cache_key()}))
