"""Fingerprint and kind of a tokenizer; unsupported tokenizers are rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.tokenizer_file import (
    continuation_tokenizer,
    fingerprint,
    has_byte_fallback,
    kind_of,
    metaspace_of,
)
from tests import tiny_models
from tests.protocol import known_tokenizers

JSON = dict[str, Any]


def plain(name: str = "whole_number") -> JSON:
    return json.loads(known_tokenizers.description(name))


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
def test_a_tokenizer_has_the_same_fingerprint_after_saving_and_loading(name, tmp_path: Path):
    file = str(tmp_path / "tokenizer.json")
    known_tokenizers.tokenizer(name).save(file)

    loaded = Tokenizer.from_file(file)

    assert fingerprint(json.loads(loaded.to_str())) == fingerprint(plain(name))
    assert len(fingerprint(plain(name))) == 32


@pytest.mark.parametrize(
    "make",
    [
        tiny_models.digit_tokenizer,
        tiny_models.whole_number_tokenizer,
        tiny_models.sentencepiece_tokenizer,
    ],
)
def test_a_model_folder_has_the_fingerprint_of_its_tokenizer(make, tmp_path: Path):
    wrapped = make()
    wrapped.save_pretrained(tmp_path)

    loaded = AutoTokenizer.from_pretrained(tmp_path)

    before, after = (
        fingerprint(json.loads(wrapper.backend_tokenizer.to_str())) for wrapper in (wrapped, loaded)
    )
    assert after == before


def test_what_does_not_change_tokens_does_not_change_the_fingerprint():
    tokenizer = known_tokenizers.tokenizer("whole_number")
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", 0)]
    )

    assert fingerprint(json.loads(tokenizer.to_str())) == fingerprint(plain())


def test_the_order_of_the_file_does_not_change_the_fingerprint():
    description = plain()
    description["added_tokens"].reverse()
    description["model"]["vocab"] = dict(reversed(description["model"]["vocab"].items()))

    assert fingerprint(description) == fingerprint(plain())


def _swap_merges(description: JSON) -> None:
    merges = description["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _rename_a_token(description: JSON) -> None:
    vocabulary = description["model"]["vocab"]
    vocabulary["renamed"] = vocabulary.pop(list(vocabulary)[-1])


def _add_a_token(description: JSON) -> None:
    description["added_tokens"].append({**description["added_tokens"][-1], "content": "<more>"})


CHANGES: dict[str, Callable[[JSON], object]] = {
    "merges": _swap_merges,
    "vocabulary": _rename_a_token,
    "added token": _add_a_token,
    "added token no longer special": lambda d: d["added_tokens"][0].update(special=False),
    "normalizer": lambda d: d.update(normalizer=None),
    "pre-tokenizer": lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
    "byte fallback": lambda d: d["model"].update(byte_fallback=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_tokens_changes_the_fingerprint(change):
    description = plain()
    CHANGES[change](description)

    assert fingerprint(description) != fingerprint(plain())


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
def test_kinds_are_distinguished(name):
    byte_level = name in known_tokenizers.BYTE_LEVEL

    assert kind_of(plain(name)) == ("byte_level" if byte_level else "metaspace")
    assert has_byte_fallback(plain(name)) is not byte_level
    assert metaspace_of(plain(name)) == "▁"


def test_word_piece_tokenizer_is_rejected():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    with pytest.raises(DataError, match=r"unsupported tokenizer: .* WordPiece .* expected"):
        kind_of(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("mark", ["end_of_word_suffix", "continuing_subword_prefix"])
def test_tokens_with_a_mark_that_no_text_has_are_rejected(mark):
    unmarked, marked = plain(), plain()
    unmarked["model"][mark], marked["model"][mark] = "", "</w>"

    assert kind_of(unmarked) == kind_of(plain())
    with pytest.raises(DataError, match=mark):
        kind_of(marked)


def test_a_tokenizer_without_a_reversible_space_is_refused_with_a_sentence():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    with pytest.raises(DataError, match=r"BPE tokenizer with steps \['Whitespace'\] .*; expected"):
        kind_of(json.loads(tokenizer.to_str()))


def test_another_space_mark_is_read_from_the_tokenizer():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")

    assert metaspace_of(json.loads(tokenizer.to_str())) == "_"


@pytest.mark.parametrize("name", ["digit", "sentencepiece"])
def test_added_tokens_keep_their_ids_behind_a_gap(name):
    description = json.loads(known_tokenizers.with_thinking_marks(name).to_str())
    last = description["added_tokens"][-1]
    last["id"] += 10

    tokenizer = continuation_tokenizer(description)

    assert tokenizer.token_to_id(last["content"]) == last["id"]
    assert last["id"] in tokenizer.encode(f"a{last['content']}b").ids


def test_added_tokens_that_would_be_renumbered_are_refused():
    description = json.loads(known_tokenizers.with_thinking_marks("unigram").to_str())
    last = description["added_tokens"][-1]
    last["id"] += 10

    with pytest.raises(DataError, match=f"has id {last['id']}, but the tokenizers library numbers"):
        continuation_tokenizer(description)
