"""Loading of a tokenizer and its chat template from files."""

import pytest

from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import ConfigError, MissingPackageError
from tests import tiny_models


def test_truncation_and_padding_are_disabled(tmp_path):
    wrapped = tiny_models.digit_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(2)
    wrapped.backend_tokenizer.enable_padding(length=100)
    wrapped.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    plain = tiny_models.digit_tokenizer().backend_tokenizer.encode(
        "a b c d", add_special_tokens=False
    )
    assert tokenizer.tokenizer.encode("a b c d", add_special_tokens=False).ids == plain.ids


@pytest.mark.parametrize("source", ["/no/such/folder", "./none", "name"])
def test_an_unknown_source_raises(source):
    with pytest.raises(ConfigError, match=source) as caught:
        load_tokenizer(source)
    assert caught.value.key == "tokenizer"


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_folder_without_a_valid_tokenizer_raises(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.key == "tokenizer"


def test_without_transformers_the_error_names_the_package(tmp_path, monkeypatch):
    tiny_models.digit_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingPackageError) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.key == "transformers"
