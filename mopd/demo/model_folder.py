"""Save a trained model atomically as a Hugging Face folder."""

import json
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mopd.demo.recipes import Recipe
from mopd_protocol import replacing_folder

_KEY_FILE = "demo_recipe.json"


def is_cached(recipe: Recipe, folder: Path) -> bool:
    """Return True if ``folder`` contains a model of this recipe."""
    key_file = folder / _KEY_FILE
    if not key_file.is_file():
        return False
    return json.loads(key_file.read_text())["cache_key"] == recipe.cache_key()


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, folder: Path
) -> None:
    """Save to a temporary folder and rename it."""
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / _KEY_FILE).write_text(json.dumps({"cache_key": recipe.cache_key()}))
