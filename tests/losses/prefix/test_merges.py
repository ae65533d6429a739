"""Tokenizers that merge, where a text is one token and no longer one once more follows."""

import string
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from bench.byte_models import false_loss, merging_pair, merging_tokenizer
from tests.losses.prefix_pairs import Pair, Tongue, compared, model_rows
from tests.reference import prefix_kl as slow
from tests.reference.text_model import TokenModel, markov_texts

#: Nats in place of -inf, which has no gradient.
LOWEST = -60


@pytest.mark.parametrize(
    ("letters", "longest", "merges", "seed"),
    [
        ("ab", 6, 12, 0),  # the student's `bbb`, but `bb|bb`
        ("abcd", 3, 12, 5),  # the student's `cd`, but `c|da`
        ("ab", 5, 12, 2),  # the student's `bbb`, but `bb|bb`, inside a token
        ("ab", 6, 6, 8),  # the student's `baa`, but of a teacher's `aa` after `b`, its `a`
        ("abc", 4, 12, 24),  # the teacher's `a|c` inside its `aaa`, and its unlikely `acb`
        ("ab", 6, 6, 14),  # the teacher's `aa|b` inside its `aabb`
        ("ab", 6, 12, 10),  # the student's `ab`, in front of much that is unlikely
        ("ab", 6, 12, 27),  # its sampled `baa` does not show where its `ba` belongs
    ],
)
def test_text_that_is_one_token_until_more_follows_has_hardly_any_loss(
    letters: str, longest: int, merges: int, seed: int
) -> None:
    texts = markov_texts(letters, longest, seed)
    assert false_loss(merging_pair(seed, letters, merges), texts, top_k=64) <= 0.004


def test_a_token_behind_an_open_one_is_in_the_cell_of_its_beginning() -> None:
    # The student's `zumos`, but `zum|osa`: its token decides `um` of the teacher's `umos`, whose
    # tokenizer never divides it.
    student = merging_tokenizer(["zu", "zum", "os", "osa", "zumos"], "<over>")
    teacher = merging_tokenizer(["um", "os", "umos"], "<stop>")
    texts = {"xzumos": 0.6, "xkis": 0.4}
    assert false_loss(Pair(student, teacher), texts, top_k=64) <= 1e-3


def test_a_candidate_is_in_the_cell_of_its_beginning_though_a_token_of_it_is_not() -> None:
    # The student's `abcde` is no part of the cell `ab`, but its `ab|cdefg` is the teacher's
    # `abcdefg`. Many tokens begin with `a`, so that `abcde` is not tried for that cell.
    others = [f"a{letter}" for letter in string.ascii_uppercase + string.digits]
    student = merging_tokenizer([*others, "cd", "cde", "fg", "cdefg", "ab", "abcde"], "<over>")
    teacher = merging_tokenizer(["ab", "cd", "cde", "abcde", "fg", "abcdefg", "ax"], "<stop>")
    pair = Pair(student, teacher)
    texts = {"abcdefg": 0.3, "abq": 0.3, "axq": 0.2, "abz": 0.2}
    assert false_loss(pair, texts, top_k=64) <= 1e-3
    _assert_equals_the_slow_twin(pair, texts, {**texts, "abcdefg": 0.4, "abq": 0.2})


def test_a_character_behind_a_lookahead_may_begin_a_shorter_token() -> None:
    # The teacher is sure of `a|Ã`, of which the student has `aè`; but it has `a|ê`.
    student = merging_tokenizer(["Ã¨", "aÃ¨", "Ãª", "ax"], "<over>")
    teacher = merging_tokenizer([], "<stop>")
    texts = {"axx": 0.3, "aè": 0.35, "aê": 0.35}
    assert false_loss(Pair(student, teacher), texts, top_k=64) <= 1e-3


@pytest.mark.parametrize(
    ("student", "teacher", "seed"),
    [
        (["bÃ", "©b", "ba", "©bba", "aÃ"], ["ba", "Ã©", "Ã©a", "Ã©a©", "aba"], 10),
        (["aÃ", "aÃ©", "bb", "©Ã", "©a"], ["ba", "baÃ", "bÃ", "©bÃ", "babÃ"], 30),
        (["aÃ", "©Ã", "ba", "aa", "©a"], ["aa"], 34),
    ],
)
def test_tokens_of_parts_of_several_characters_have_no_loss(
    student: list[str], teacher: list[str], seed: int
) -> None:
    # `Ã©` is `é`.
    pair = Pair(merging_tokenizer(student, "<over>"), merging_tokenizer(teacher, "<stop>"))
    texts, others = (markov_texts("éab", 3, each) for each in (seed, seed + 1))
    assert false_loss(pair, texts, top_k=64) <= 0.01
    _assert_equals_the_slow_twin(pair, texts, others, every=7)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("student", "teacher", "text"),
    [
        (["Ģa", "Ģab"], ["ab"], "𓀀ab"),  # the token begins with the last byte of a character
        (["_d", "ir", "_dir"], ["ir", "dir"], "tmp_dir"),  # a word ends in front of the token
    ],
)
def test_a_boundary_inside_the_last_token_equals_the_slow_twin(
    student: list[str], teacher: list[str], text: str, seed: int
) -> None:
    # The completion is cut: no row is after the token.
    pair = Pair(merging_tokenizer(student, "<over>"), merging_tokenizer(teacher, "<stop>"))
    ids = pair.student.encoder.encode(text), pair.teacher.encoder.encode(text)
    torch.manual_seed(seed)
    logits, rows = (
        _random_logits(side, len(own), text)
        for side, own in zip((pair.student, pair.teacher), ids, strict=True)
    )
    real = torch.tensor(pair.teacher.table.real_ids(pair.teacher.logit_width))
    rows = rows.masked_fill(~real, -torch.inf).log_softmax(dim=1)
    comparison = compared(pair, *ids, rows, k=64)
    output = pair.value(logits, pair.targets([comparison], bounds=False))
    sides = _sides(pair, ids, logits, comparison.score.topk)
    expected = torch.tensor(slow.per_token(*sides, "forward_kl", 0.0), dtype=torch.float64)
    torch.testing.assert_close(output.per_token, expected, rtol=1e-6, atol=1e-8)


def _random_logits(side: Tongue, tokens: int, text: str) -> torch.Tensor:
    """[tokens, width], of which the tokens of a text's bytes and of a few letters are likely."""
    likely = [
        token
        for token, spelled in enumerate(side.table.all_bytes)
        if spelled and set(spelled) <= set(text.encode() + b"abcd")
    ]
    logits = torch.randn(tokens, side.logit_width, dtype=torch.float64) - 6
    logits[:, likely] += 6 + 2 * torch.randn(tokens, len(likely), dtype=torch.float64)
    return logits


@pytest.mark.parametrize(("letters", "merges", "seed"), [("ab", 12, 0), ("ab", 6, 11)])
def test_values_of_a_byte_model_equal_the_slow_twin(letters: str, merges: int, seed: int) -> None:
    texts, others = (markov_texts(letters, 4, each) for each in (seed, seed + 1))
    _assert_equals_the_slow_twin(merging_pair(seed, letters, merges), texts, others, every=3)


def _assert_equals_the_slow_twin(
    pair: Pair, texts: Mapping[str, float], others: Mapping[str, float], every: int = 1
) -> None:
    """Compare a student of some texts with a teacher of the same ones in other shares."""
    student = TokenModel(dict(texts), pair.student.tokenize)
    other = TokenModel(dict(others), pair.teacher.tokenize)
    for text in list(texts)[::every]:
        ids = pair.student.ids(student.written[text]), pair.teacher.ids(other.written[text])
        rows = model_rows(pair.teacher, other, text)
        comparison = compared(pair, *ids, rows, k=64)
        logits = model_rows(pair.student, student, text).clamp_min(LOWEST)
        output = pair.value(logits, pair.targets([comparison], bounds=False))
        sides = _sides(pair, ids, logits, comparison.score.topk)
        expected = torch.tensor(slow.per_token(*sides, "forward_kl", 0.0), dtype=torch.float64)
        torch.testing.assert_close(output.per_token, expected, rtol=1e-6, atol=1e-8)


def _sides(
    pair: Pair, ids: tuple[list[int], list[int]], logits: torch.Tensor, topk: Any
) -> tuple[slow.Side, slow.Side]:
    """The student and the teacher for the slow twin."""
    table = pair.student.table
    every = [token for token in range(table.size) if table.present[token]]
    own = logits.masked_fill(~pair.real_ids, -torch.inf).log_softmax(dim=1)
    kept = [[token for token in row if token >= 0] for row in topk.ids.tolist()]
    rows = torch.full((len(ids[1]), pair.teacher.logit_width), -torch.inf, dtype=torch.float64)
    for at, (known, nats) in enumerate(zip(kept, topk.logprobs, strict=True)):
        rows[at, known] = torch.from_numpy(nats[: len(known)])
    return pair.student.side(ids[0], own, [every] * len(ids[0])), pair.teacher.side(
        ids[1], rows, kept
    )
