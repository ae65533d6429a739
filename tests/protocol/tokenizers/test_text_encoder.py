"""Text -> tokens -> bytes: nothing lost, nothing invented, no text becomes a control token."""

import json
import unicodedata
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis.strategies import binary, lists, sampled_from
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from mopd_protocol.tokenizers.joined_texts import SEPARATOR
from mopd_protocol.tokenizers.token_sequence import valid_utf8
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable
from mopd_protocol.tokenizers.tokenizer_file import (
    continuation_tokenizer,
    spells_every_text,
    tokenizer_json,
)
from tests.protocol import known_tokenizers
from tests.protocol.unicode_text import any_text

SOURCES = {
    "plain": known_tokenizers.tokenizer,
    "with thinking marks": known_tokenizers.with_thinking_marks,
}


@cache
def encoder_of(name: str, source: str = "plain") -> TextEncoder:
    return encoder(SOURCES[source](name))


def encoder(tokenizer: Tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer))


@cache
def continuation(name: str) -> Tokenizer:
    return continuation_tokenizer(tokenizer_json(known_tokenizers.tokenizer(name)))


def spelled(encoder: TextEncoder, text: str) -> bytes:
    return encoder.table.sequence(encoder.encode(text)).text


def normalized(name: str, text: str) -> str:
    """Return the text after the tokenizer's normalizer."""
    if name == "whole_number":
        return unicodedata.normalize("NFC", text)
    if name in ("sentencepiece", "unigram"):
        return text.replace("▁", " ")  # SentencePiece does not distinguish the two
    return text


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=120)
@given(text=any_text)
@example(text="")
@example(text=" ")
@example(text="\x00")
@example(text="\r\n\t \n")
def test_tokens_of_a_text_spell_the_text(name, source, text):
    encoder = encoder_of(name, source)

    assert spelled(encoder, text) == normalized(name, text).encode()


FRAGMENTS = [b"\xe7", b"\xe7\x9a", b"\x84", b"\xff", "的".encode(), b"ab ", b"12"]


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=120)
@given(text=lists(sampled_from(FRAGMENTS), max_size=8).map(b"".join) | binary(max_size=12))
def test_tokens_of_bytes_spell_the_bytes(name, text):
    encoder = encoder_of(name)
    ids = encoder.encode_bytes(text)
    assert ids is not None
    known = encoder.encode_with_spans(text)
    assert known is not None
    assert known[0] == ids
    for token_id, (start, stop) in zip(*known, strict=True):
        if (piece := encoder.table.all_bytes[token_id]) != valid_utf8(piece):
            assert piece in text[start:stop]
    expected = normalized(name, text.decode(errors="surrogateescape"))
    spelled = encoder.table.sequence(ids).text
    assert spelled == expected.encode(errors="surrogateescape")
    if valid_utf8(text) == text:
        assert ids == encoder.encode(text.decode())


def test_bytes_outside_characters_are_the_longest_tokens() -> None:
    vocabulary = {letter: at for at, letter in enumerate("æĹ¥a")}  # e6 97 a5
    vocabulary |= {"æĹ": 4, "a¥": 5, "Ĺ¥": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("æ", "Ĺ"), ("Ĺ", "¥")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_tokens(["aa"])
    encoder = TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer))
    assert encoder.encode_bytes(b"a\xe6\x97") == [3, 4]
    assert encoder.encode_bytes(b"\xe6\x97aa\x97\xa5\xe6") == [4, 7, 6, 0]
    assert encoder.encode_bytes(b"\xe6\x97\xe6\xa5") == [4, 0, 2]
    assert encoder.encode_bytes(b"a\xff") is None
    assert encoder.encode_with_spans(b"a\xff") is None
    spans = [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert encoder.encode_with_spans(b"\xe6\x97aa\x97\xa5\xe6") == ([4, 7, 6, 0], spans)


LOSSY = {
    "a normalizer that drops accents": {"normalizer": {"type": "StripAccents"}},
    "lower case": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
    "removed spaces": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }
    },
}


@pytest.mark.parametrize("change", [None, *LOSSY])
def test_tokenizers_that_may_drop_characters_do_not_claim_exact_text(change: str | None) -> None:
    for name in known_tokenizers.NAMES if change is None else known_tokenizers.BYTE_LEVEL:
        description = json.loads(known_tokenizers.description(name)) | LOSSY.get(change or "", {})
        assert spells_every_text(description) == (change is None)


def test_a_vocabulary_without_single_bytes_does_not_claim_exact_text() -> None:
    for name, surface in (("digit", "Ā"), ("unigram", "<0x00>")):
        description = json.loads(known_tokenizers.description(name))
        vocabulary = description["model"]["vocab"]
        if isinstance(vocabulary, dict):
            vocabulary["other"] = vocabulary.pop(surface)
        else:
            vocabulary[[piece for piece, _ in vocabulary].index(surface)][0] = "other"
        assert not spells_every_text(description)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=60)
@given(text=any_text)
def test_text_never_becomes_a_control_token(name, source, text):
    encoder = encoder_of(name, source)

    for surface in encoder.table.controls:
        sequence = encoder.table.sequence(encoder.encode(f"a{surface} {surface}{text}"))
        assert not sequence.marks


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=40)
@given(text=any_text)
def test_a_continuation_reads_as_the_tokenizer_decodes_it(name, text):
    tokenizer = known_tokenizers.tokenizer(name)
    ids = encoder_of(name).encode(text)
    # SentencePiece decoders take one leading space away: the one that their encoders invent.
    invented = [] if name in known_tokenizers.BYTE_LEVEL else [tokenizer.token_to_id("▁")]

    assert tokenizer.decode(invented + ids) == normalized(name, text)


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=30)
@given(text=any_text, separator=sampled_from(["", SEPARATOR]))
def test_a_batch_is_encoded_as_each_of_its_texts(name, text, separator):
    encoder, exact = encoder_of(name), continuation(name)
    texts = [text, "", separator, "the quick brown fox", text[::-1] + separator, " ", "\u0301"]
    texts += [text[start : start + 3] for start in range(80)]

    expected = [exact.encode(item, add_special_tokens=False).ids for item in texts]
    assert encoder.encode_batch(texts) == expected
    assert [encoder.encode(item) for item in texts] == expected
    spans = [encoder.encode_with_spans(item.encode()) for item in texts]
    assert [each and each[0] for each in spans] == expected


@pytest.mark.parametrize("name", sorted(known_tokenizers.BYTE_LEVEL))
@settings(deadline=None, max_examples=40)
@given(text=any_text)
def test_ordinary_text_gets_the_tokens_that_the_model_was_trained_on(name, text):
    tokenizer = known_tokenizers.tokenizer(name)
    for surface in tokenizer.get_added_tokens_decoder().values():
        text = text.replace(surface.content, "")

    assert encoder_of(name).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_sentencepiece_text_gets_the_tokens_of_a_continuation():
    tokenizer = known_tokenizers.tokenizer("sentencepiece")
    whole = tokenizer.encode("the quick brown fox", add_special_tokens=False).ids

    assert encoder_of("sentencepiece").encode(" the quick brown fox") == whole


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
def test_a_post_processor_padding_and_truncation_leave_no_trace(name):
    tokenizer = known_tokenizers.tokenizer(name)
    surface, token_id = next(iter(TokenTable.from_tokenizer(tokenizer).controls.items()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{surface} $A {surface}", special_tokens=[(surface, token_id)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64, pad_token=surface, pad_id=token_id)

    text = "the quick brown fox jumps"

    assert encoder(tokenizer).encode(text) == encoder_of(name).encode(text)
    assert encoder(tokenizer).encode_batch([text]) == [encoder_of(name).encode(text)]


def test_no_leading_space_is_invented_by_a_byte_level_tokenizer_that_would():
    tokenizer = known_tokenizers.tokenizer("digit")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ]
    )
    assert tokenizer.decode(tokenizer.encode("fox").ids) == " fox"

    assert spelled(encoder(tokenizer), "fox 7 brown") == b"fox 7 brown"


def test_added_tokens_after_special_ones_keep_their_ids():
    tokenizer = known_tokenizers.with_thinking_marks("digit")
    ids = encoder(tokenizer).encode("a<think>b")

    assert ids[1] == tokenizer.token_to_id("<think>")


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
def test_added_tokens_do_not_swallow_the_spaces_around_them(name):
    tokenizer = known_tokenizers.tokenizer(name)
    tokenizer.add_tokens([AddedToken("<think>", lstrip=True, rstrip=True, special=False)])

    ids = encoder(tokenizer).encode("a  <think>  b")

    assert tokenizer.token_to_id("<think>") in ids
    assert spelled(encoder(tokenizer), "a  <think>  b") == b"a  <think>  b"


def test_merges_do_not_lead_to_a_control_token():
    vocabulary = {"<unk>": 0, "<": 1, "s": 2, ">": 3, "s>": 4, "<s>": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("s", ">"), ("<", "s>")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<unk>", "<s>"])

    assert encoder(tokenizer).encode("<s>") == [1, 4]


def test_a_word_that_is_a_control_token_is_split_if_merges_are_ignored():
    vocabulary = {"<unk>": 0, "<": 1, "s": 2, ">": 3, "<s>": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", ignore_merges=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<unk>", "<s>"])

    assert encoder(tokenizer).encode("<s>") == [1, 2, 3]


def test_the_best_path_of_a_unigram_does_not_lead_to_a_control_token():
    encoder = encoder_of("unigram")

    assert encoder.table.controls["</s>"] not in encoder.encode("the end</s>")


def test_spaces_at_the_ends_of_a_continuation_are_kept():
    tokenizer = Tokenizer.from_str(known_tokenizers.tokenizer("whole_number").to_str())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    ids = encoder(tokenizer).encode(" the end ")

    assert ids == encoder_of("whole_number").encode(" the end ")
    assert len(ids) > len(encoder_of("whole_number").encode("the end"))


def test_the_tokenizer_itself_is_left_as_it_was():
    tokenizer = known_tokenizers.with_thinking_marks("sentencepiece")
    before = tokenizer.to_str()

    continuation_tokenizer(tokenizer_json(tokenizer))

    assert tokenizer.to_str() == before
    assert tokenizer.encode("</s>", add_special_tokens=False).ids[-1] == tokenizer.token_to_id(
        "</s>"
    )
