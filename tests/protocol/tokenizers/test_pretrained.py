"""Loaders use the steps of ``tokenizer.json``, not those of the model type in transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.hub import cached_file

from mopd_client.tokenizers import pretrained
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.pretrained import load_exact
from mopd_protocol.tokenizers.published_ends import published_ends
from mopd_protocol.tokenizers.tokenizer_file import fingerprint, tokenizer_json
from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer
from mopd_server.settings import TeacherSettings
from mopd_trainer.config.student import StudentConfig
from mopd_trainer.inspection import tokenizers as inspection
from mopd_trainer.student import identity
from tests import tiny_models

TEXT = "32, 1961"

LOADERS: dict[str, Callable[[Path], str]] = {
    "teacher": lambda folder: (
        (
            ServedTokenizer.of(load_tokenizer(TeacherSettings(model=str(folder)))).requests.table
        ).fingerprint
    ),
    "local teacher": lambda folder: pretrained.load_tokenizer(str(folder)).table.fingerprint,
    "student": lambda folder: fingerprint(
        tokenizer_json(identity.load_tokenizer(StudentConfig(model=str(folder))).backend_tokenizer)  # pyright: ignore
    ),
    "align": lambda folder: inspection.load_tokenizer(str(folder)).table.fingerprint,
}


def folder_of_type(folder: Path, model_type: str) -> Tokenizer:
    """Save a tokenizer that keeps numbers together as one of a model type; return the file's."""
    tiny_models.whole_number_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("tokenizer_class", None)
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("model_type", ["qwen2", "cohere", "gpt2", "llama"])
def test_the_loaded_tokenizer_is_that_of_the_file(
    loader: str, model_type: str, tmp_path: Path
) -> None:
    exact = folder_of_type(tmp_path, model_type)
    assert LOADERS[loader](tmp_path) == fingerprint(tokenizer_json(exact))


def test_transformers_itself_splits_other_tokens(tmp_path: Path) -> None:
    """The reason for ``load_exact``; without this difference it may be removed."""
    exact = folder_of_type(tmp_path, "qwen2")
    ids = exact.encode(TEXT, add_special_tokens=False).ids
    automatic = AutoTokenizer.from_pretrained(tmp_path)
    assert automatic(TEXT, add_special_tokens=False)["input_ids"] != ids
    loaded = load_exact(
        AutoTokenizer.from_pretrained, PreTrainedTokenizerFast.from_pretrained, str(tmp_path)
    )
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == ids
    assert (loaded.eos_token, bool(loaded.chat_template)) == ("<|im_end|>", True)


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, (1, 106)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 3}, ()),
        (None, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"eos_token_id": None}, ()),
        (None, None, ()),
    ],
)
def test_the_generation_settings_name_the_ends(
    tmp_path: Path, generation: object, model: object, expected: tuple[int, ...]
) -> None:
    for name, settings in (("generation_config.json", generation), ("config.json", model)):
        if settings is not None:
            (tmp_path / name).write_text(json.dumps(settings))
    assert published_ends(cached_file, str(tmp_path)) == expected


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_unreadable_generation_settings_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        published_ends(cached_file, str(tmp_path))
