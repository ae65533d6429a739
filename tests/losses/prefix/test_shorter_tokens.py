"""Tokens in place of a longer one, and runs of white space, which what follows divides."""

from string import ascii_lowercase, ascii_uppercase

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bench.byte_models import false_loss
from mopd_losses.prefix.vocabulary.hashed_strings import string_hashes
from mopd_losses.prefix.vocabulary.merges import Merges
from mopd_losses.prefix.vocabulary.shorter_tokens import ShorterTokens
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from tests.losses.prefix_pairs import Pair, Tongue, compared, model_rows
from tests.reference.text_model import TokenModel


def tongue(end: str, merges: list[tuple[str, str]], *, words: bool | str = False) -> Tongue:
    """Return a byte-level BPE; with ``words``, a space belongs to the next word, or a pattern
    divides the text. Two sides with other names of the end have other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=end == "<stop>")
    vocabulary = {each: rank for rank, each in enumerate(alphabet)}
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is True)
    split = [pre_tokenizers.Split(Regex(words), "isolated")] if isinstance(words, str) else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return Tongue.ended(tokenizer, end)


def test_a_shorter_token_is_found_by_what_follows() -> None:
    # `bc` is merged before `ab`, so that `abc` is `a|bc`.
    side = tongue("<over>", [("b", "c"), ("a", "b"), ("x", "y")])
    vocabulary = SortedVocabulary(side.table, {"end_of_turn": chr(0x100)})
    texts = ["ab", "xy", "bc"]
    shorter = ShorterTokens(vocabulary, side.encoder, Merges(vocabulary, side.encoder.merges))
    bits = shorter.of(string_hashes(texts), texts.__getitem__)
    np.testing.assert_array_equal(bits, [1 << 1, 0, 0])


@pytest.mark.parametrize(
    "texts",
    [("-abcde", "-xyz", "-z"), ("-ab", "-abcde", "-z"), ("-xyz", "-abx", "-abcde")],
)
def test_a_candidate_that_begins_with_another_token_has_no_loss(texts: tuple[str, ...]) -> None:
    # The teacher writes `abc|de`; the student `ab|cde`, although its `abcz` begins with `abc`.
    student = tongue(
        "<over>", [("d", "e"), ("c", "de"), ("a", "b"), ("ab", "c"), ("abc", "z"), ("x", "y")]
    )
    teacher = tongue("<stop>", [("a", "b"), ("ab", "c"), ("d", "e"), ("y", "z")])
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 0.01


def test_a_token_that_another_text_divides_has_no_loss() -> None:
    # The student has `ab|x`, but `a|bcd`, of which the teacher's `c` after `ab` is the third
    # letter.
    student = tongue("<over>", [("c", "d"), ("b", "cd"), ("a", "b")])
    teacher = tongue("<stop>", [("a", "b"), ("x", "y")])
    assert student.tokenize("-abx-abcd") == ["-", "ab", "x", "-", "a", "bcd"]
    masses = dict.fromkeys(("-abx", "-abcd", "-z"), 1 / 3)
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 0.01


def test_white_space_that_the_next_word_divides_has_no_loss() -> None:
    space = "Ġ"
    runs = [(space * n, space) for n in range(1, 5)]
    student = tongue("<over>", [(space, "b"), *runs], words=True)
    teacher = tongue("<stop>", runs)
    assert student.tokenize("x   b") == ["x", "  ", " b"]
    assert teacher.tokenize("x   b") == ["x", "   ", "b"]
    masses = {f"x{' ' * n}b": 1 / 3 for n in (2, 3, 4)}
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 0.01


@pytest.mark.parametrize("texts", [("-abcx", "-abcd", "-abz", "-z"), ("-abcx", "-abcd")])
@pytest.mark.parametrize("is_students", [True, False])
def test_a_shorter_token_that_is_a_cell_itself_may_belong_to_the_longer_one(
    is_students: bool, texts: tuple[str, ...]
) -> None:
    # `abc` is sampled, and one token of both sides; of one side's token `ab`, some is `ab|cd`, and
    # some is `ab|z`.
    merges = [("c", "d"), ("a", "b"), ("ab", "c")]
    divided = tongue("<over>" if is_students else "<stop>", merges)
    other = tongue("<stop>" if is_students else "<over>", merges[1:])
    assert divided.tokenize("-abcx-abcd") == ["-", "abc", "x", "-", "ab", "cd"]
    pair = Pair(divided, other) if is_students else Pair(other, divided)
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(pair, masses, top_k=16, lowest=-20) <= 1e-4


@pytest.mark.parametrize("texts", [("-paidb", "-painx", "-pains"), ("-paidb", "-painx", "-paix")])
def test_what_a_longer_cell_excludes_stays_in_the_shorter_one(texts: tuple[str, ...]) -> None:
    # After `p`, the text `ai` of `p|ai|d` is no part of the cell `a`, which `pa` begins; but that
    # cell has `ain`, for the teacher writes `pa|in`. Too many tokens begin with `pai` to try each.
    longer = [("pai", each) for each in ascii_lowercase]
    student = tongue("<over>", [("p", "a"), ("pa", "i"), *longer])
    teacher = tongue("<stop>", [("i", "n"), ("a", "i"), ("p", "a")])
    assert teacher.tokenize("-paidb-painx") == ["-", "p", "ai", "d", "b", "-", "pa", "in", "x"]
    masses = dict.fromkeys(texts, 1 / 3)
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 0.01


@pytest.mark.parametrize("texts", [("-paib", "-xy", "-z"), ("-paib", "-pa", "-xy")])
def test_a_continuation_shows_that_a_longer_token_is_in_the_cell(texts: tuple[str, ...]) -> None:
    # The teacher writes `p|ai`, but `pa|ib`: the student's `pai|b` is part of the cell `pa`.
    student = tongue("<over>", [("p", "a"), ("pa", "i")])
    teacher = tongue("<stop>", [("i", "b"), ("a", "i"), ("p", "a")])
    assert teacher.tokenize("-pai-paib") == ["-", "p", "ai", "-", "pa", "ib"]
    masses = dict.fromkeys(texts, 1 / 3)
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 0.01


@pytest.mark.parametrize("texts", [("-abcx", "-abcd", "-z"), ("-abcx", "-abcd")])
def test_text_inside_a_token_is_divided_anew_by_what_follows(texts: tuple[str, ...]) -> None:
    # After the `c` of `ab|cd`, no token contains `cx`; but with `x`, the text is `a|bc|x`.
    student = tongue("<over>", [("c", "d"), ("b", "c"), ("a", "b")])
    teacher = tongue("<stop>", [("y", "z")])
    assert student.tokenize("-abcx-abcd") == ["-", "a", "bc", "x", "-", "ab", "cd"]
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 1e-4


def test_a_token_of_another_cell_explains_nothing_of_a_shorter_one() -> None:
    # After `mi`, the teacher has begun `ip` and `ipl`. The student continues with `pl`, which is
    # no part of the cell `p`: it writes that as `m|ip`, over the text before.
    student = tongue("<over>", [("p", "l"), ("i", "p"), ("m", "i")])
    teacher = tongue("<stop>", [("i", "p"), ("ip", "l")])
    assert student.tokenize("-mip-mipl") == ["-", "m", "ip", "-", "mi", "pl"]
    pair, texts = Pair(student, teacher), dict.fromkeys(("-mip-", "-mipl-"), 0.5)
    models = [TokenModel(texts, side.tokenize) for side in (student, teacher)]
    ids = [s.ids(m.written["-mipl-"]) for s, m in zip((student, teacher), models, strict=True)]
    comparison = compared(pair, *ids, model_rows(teacher, models[1], "-mipl-"), k=16)
    logits = model_rows(student, models[0], "-mipl-").clamp_min(-20)
    assert pair.value(logits, pair.targets([comparison])).per_token.sum() <= 0.01


@pytest.mark.parametrize("texts", [("-abcde", "-abwz"), ("-abcde", "-abwz", "-z")])
def test_a_token_that_begins_later_is_in_the_cell_that_an_open_one_is_not(
    texts: tuple[str, ...],
) -> None:
    # The teacher writes `a|b|cd`, so that the student's `abcd` is no part of the cell `c` after
    # `b`; but `a|bc|de`, which is `ab|cde` for the student.
    student = tongue("<over>", [("d", "e"), ("a", "b"), ("c", "de"), ("c", "d"), ("ab", "cd")])
    teacher = tongue("<stop>", [("d", "e"), ("c", "d"), ("b", "c"), ("b", "w")])
    assert student.tokenize("-abcd-abcde") == ["-", "abcd", "-", "ab", "cde"]
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 1e-3


@pytest.mark.parametrize("texts", [("-a;", "-abcd"), ("-a;", "-abcd", "-z")])
def test_what_divides_a_cell_may_lead_to_it_over_a_longer_token(texts: tuple[str, ...]) -> None:
    # For the student `a|bc`, but `ab|cd`: the cell `bc` after `a` is mass of its `ab`, too.
    student = tongue("<over>", [("c", "d"), ("b", "c"), ("a", "b")])
    teacher = tongue("<stop>", [("b", "c"), ("a", "bc")])
    assert student.tokenize("-abc-abcd") == ["-", "a", "bc", "-", "ab", "cd"]
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 1e-3


@pytest.mark.parametrize("texts", [("    \nq", "    b", "  b"), ("    \nq", "    b", "  b", "z")])
def test_a_lookahead_behind_spaces_lacks_words_that_take_one(texts: tuple[str, ...]) -> None:
    # After the teacher's four spaces, the student has a token with a line feed, too. In front of a
    # word it has three, and the fourth is part of the word.
    spaces = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    pattern = r"\s*\n|\s+(?!\S)|\s?\w+|\s+"
    merges = [*spaces, ("ĠĠ", "Ġ"), ("ĠĠĠĠ", "Ċ"), ("Ġ", "b")]
    student, teacher = tongue("<over>", merges, words=pattern), tongue("<stop>", spaces)
    assert student.tokenize("    b    \n") == ["   ", " b", "    \n"]
    masses = dict.fromkeys(texts, 1 / len(texts))
    assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= 1e-3


@pytest.mark.parametrize("texts", [("-abzk", "-abr", "-abk"), ("-abzk", "-abr")])
def test_what_divides_a_token_need_not_be_frequent(texts: tuple[str, ...]) -> None:
    # Tokens of `b` and a capital letter are merged first, but `a` joins them: only `bz` is written
    # after it.
    longer = [each for letter in ascii_uppercase for each in (("b", letter), ("a", "b" + letter))]
    divided = [*longer, ("b", "z"), ("a", "b")]
    others = [("a", "b"), ("ab", "z")]
    masses = dict.fromkeys(texts, 1 / len(texts))
    for merges, bar in (((divided, others), 1e-3), ((others, divided), 0.1)):
        student, teacher = (
            tongue(end, each) for end, each in zip(("<over>", "<stop>"), merges, strict=True)
        )
        assert false_loss(Pair(student, teacher), masses, top_k=16, lowest=-20) <= bar
