"""Tests of the loading of a served model's tokenizer."""

import pytest

from mopd_protocol.errors import ConfigError
from mopd_server.scoring.tokenizer_loading import load_tokenizer
from mopd_server.settings import TeacherSettings


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_missing_model_folder_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(TeacherSettings(model=model))
    assert caught.value.key == "model"
    assert f"{model!r}: not found" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "content", "problem"),
    [
        (".", None, "contains no tokenizer"),
        (".", "not JSON", "loading the tokenizer failed"),
        (".", '{"model": {"type": "of the future"}}', "loading the tokenizer failed"),
        ("config.json", None, "is a file"),
    ],
)
def test_model_without_a_valid_tokenizer_is_an_error(
    model: str, content: str | None, problem: str, tmp_path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(TeacherSettings(model=str(tmp_path / model)))
    assert caught.value.key == "model"
    assert problem in str(caught.value)
