"""The bytes of tokens: against the published rules, against decoding, and what spells nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from mopd_protocol.tokenizers.token_table import TokenRoles, TokenTable, byte_level_alphabet
from tests.protocol import known_tokenizers
from tests.reference import token_bytes as reference


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@pytest.mark.parametrize(
    "source", [known_tokenizers.tokenizer, known_tokenizers.with_thinking_marks]
)
def test_every_token_spells_its_bytes_by_the_published_rules(name, source):
    tokenizer: Tokenizer = source(name)
    table = TokenTable.from_tokenizer(tokenizer)

    expected = [
        reference.token_bytes(tokenizer, token_id, byte_level=name in known_tokenizers.BYTE_LEVEL)
        for token_id in range(tokenizer.get_vocab_size())
    ]

    assert table.all_bytes == expected
    assert [table.bytes_of(token_id) for token_id in range(table.size)] == expected
    assert table.byte_lengths.tolist() == [len(piece) for piece in expected]


def test_the_byte_level_alphabet_is_the_one_that_the_library_writes():
    alphabet = byte_level_alphabet()
    writer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    # One character for each lead byte of UTF-8 and for each continuation byte.
    for code_point in [*range(0x100), *range(0x100, 0x800, 0x40), *range(0x800, 0x110000, 0x800)]:
        if 0xD800 <= code_point < 0xE000:
            continue
        character = chr(code_point)
        [(surface, _)] = writer.pre_tokenize_str(character)
        assert bytes(alphabet[mark] for mark in surface) == character.encode()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


@pytest.mark.parametrize("name", known_tokenizers.NAMES)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_sequence_is_its_tokens_bytes_one_after_the_other(name, data):
    table = TokenTable.from_tokenizer(known_tokenizers.tokenizer(name))
    ids = data.draw(st.lists(st.integers(0, table.size - 1), max_size=20))

    sequence = table.sequence(ids)

    pieces = [table.bytes_of(token_id) for token_id in ids]
    assert sequence.token_ids.tolist() == ids
    assert sequence.text == b"".join(pieces)
    assert sequence.byte_ends.tolist() == reference.running_ends(pieces)
    assert sequence.marks == {
        position: table.marks[token_id]
        for position, token_id in enumerate(ids)
        if token_id in table.marks
    }


@pytest.mark.parametrize("name", sorted(known_tokenizers.BYTE_LEVEL))
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_byte_level_sequence_reads_as_the_tokenizer_decodes_it(name, data):
    tokenizer = known_tokenizers.tokenizer(name)
    table = TokenTable.from_tokenizer(tokenizer)
    ids = data.draw(st.lists(st.integers(0, table.size - 1), max_size=20))

    assert table.sequence(ids).text.decode("utf-8", "replace") == tokenizer.decode(ids)


def test_tokens_of_half_a_character_keep_their_bytes():
    tokenizer = known_tokenizers.tokenizer("digit")
    table = TokenTable.from_tokenizer(tokenizer)

    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False).ids

    assert len(ids) > 1
    assert table.sequence(ids[:1]).text == "\U0001f9ff".encode()[: len(table.bytes_of(ids[0]))]
    assert b"".join(table.bytes_of(token_id) for token_id in ids) == "\U0001f9ff".encode()


def test_a_leading_space_is_part_of_a_token():
    table = TokenTable.from_tokenizer(_words(["çļĦ", "ĠçļĦ"]))

    assert table.all_bytes[:2] == ["的".encode(), " 的".encode()]


def test_special_tokens_spell_nothing_and_are_named():
    tokenizer = known_tokenizers.tokenizer("sentencepiece")
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    user = tokenizer.token_to_id("<|user|>")
    table = TokenTable.from_tokenizer(tokenizer, TokenRoles(bos=bos, eos=eos, end_of_turn=user))

    sequence = table.sequence([bos, user, eos, tokenizer.token_to_id("<unk>")])

    assert sequence.text == b""
    assert sequence.marks == {0: "bos", 1: END_OF_TURN, 2: END_OF_TURN, 3: "<unk>"}
    assert table.controls["<|user|>"] == user


def test_the_padding_token_is_marked_by_its_role_unless_it_ends_completions():
    tokenizer = known_tokenizers.tokenizer("digit")
    end, pad = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|pad|>")

    assert TokenTable.from_tokenizer(tokenizer, TokenRoles(pad=pad)).marks[pad] == "pad"
    ending = TokenTable.from_tokenizer(tokenizer, TokenRoles(eos=end, pad=end))
    assert ending.marks[end] == END_OF_TURN


def test_an_ending_token_spells_nothing_even_where_it_is_not_special():
    tokenizer = known_tokenizers.tokenizer("digit")
    letter = tokenizer.token_to_id("a")

    table = TokenTable.from_tokenizer(tokenizer, TokenRoles(eos=letter))

    assert table.bytes_of(letter) == b""
    assert table.marks[letter] == END_OF_TURN


def test_added_tokens_that_are_not_special_spell_their_content():
    table = TokenTable.from_tokenizer(known_tokenizers.with_thinking_marks("digit"))

    spelled = table.all_bytes[-4:]

    assert spelled == [b"", b"", b"<think>", b"    "]
    assert table.size - 2 not in table.marks


def test_added_runs_of_space_marks_spell_spaces_in_a_sentencepiece_vocabulary():
    tokenizer = known_tokenizers.tokenizer("sentencepiece")
    tokenizer.add_tokens([AddedToken("▁▁▁▁▁", normalized=False, special=False)])
    table = TokenTable.from_tokenizer(tokenizer)
    run, letter = tokenizer.token_to_id("▁▁▁▁▁"), tokenizer.token_to_id("a")

    assert table.sequence([letter, run, letter]).text == b"a     a"
    assert tokenizer.decode([letter, run, letter]) == "a     a"


def test_ids_beyond_the_tokenizer_are_refused_with_a_sentence():
    table = TokenTable.from_tokenizer(known_tokenizers.tokenizer("digit"))

    for unknown in (table.size, -1):
        with pytest.raises(DataError, match=f"token id {unknown} has no token in tokenizer"):
            table.sequence([0, unknown])


def test_holes_in_the_numbering_are_not_tokens():
    table = TokenTable.from_tokenizer(_words(["a", None, "b"]))

    assert table.size == 3
    assert table.bytes_of(1) == b""
    assert table.real_ids(5).tolist() == [True, False, True, False, False]
    with pytest.raises(DataError, match="token id 1 has no token"):
        table.sequence([0, 1])


def test_a_head_narrower_than_the_tokenizer_is_refused():
    table = TokenTable.from_tokenizer(known_tokenizers.tokenizer("digit"))

    with pytest.raises(DataError, match="a head of 419 rows cannot serve a tokenizer of 420 ids"):
        table.real_ids(table.size - 1)


def test_a_role_outside_the_vocabulary_is_refused():
    tokenizer = known_tokenizers.tokenizer("digit")

    with pytest.raises(DataError, match="role eos names token id 420, but"):
        TokenTable.from_tokenizer(tokenizer, TokenRoles(eos=420))


def test_ending_ids_are_unique_and_begin_with_the_end_of_turn():
    assert TokenRoles(eos=4, end_of_turn=7).ending == (7, 4)
    assert TokenRoles(eos=4, end_of_turn=4).ending == (4,)
    assert TokenRoles(eos=0).ending == (0,)
    assert TokenRoles().ending == ()


def test_a_table_cannot_be_written_to():
    table = TokenTable.from_tokenizer(known_tokenizers.tokenizer("digit"))

    for array in (table.offsets, table.data, table.present, table.byte_lengths):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        table.marks[0] = "other"


def test_a_special_token_that_swallows_spaces_still_spells_nothing():
    tokenizer = known_tokenizers.tokenizer("digit")
    tokenizer.add_special_tokens([AddedToken("<|mask|>", lstrip=True, special=True)])
    table = TokenTable.from_tokenizer(tokenizer)

    assert table.bytes_of(tokenizer.token_to_id("<|mask|>")) == b""


def _words(surfaces: list[str | None]) -> Tokenizer:
    """A byte-level tokenizer with these surfaces, ``None`` for a hole in the numbering."""
    vocabulary = {surface: place for place, surface in enumerate(surfaces) if surface is not None}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer
