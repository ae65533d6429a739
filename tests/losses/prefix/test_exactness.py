"""Prefix KL on known models: one byte model through two tokenizers, and hand-made rows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.naming.separate_tokens import TRIED
from tests.losses.prefix_pairs import (
    Pair,
    Tongue,
    compared,
    model_rows,
    random_pair,
    rows_of,
    with_lookaheads,
)
from tests.reference.text_model import END, TokenModel, markov_texts

every_divergence = pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])

#: Both directions of long against short tokens, partly overlapping, and long against long.
PAIRS = {
    "same": Pair(Tongue.of("ab", "aa"), Tongue.of("ab", "aa", end="<stop>")),
    "long student": Pair(Tongue.of("aa", "aaa", "ab", "aba"), Tongue.of(end="<stop>")),
    "long teacher": Pair(Tongue.of(), Tongue.of("aa", "aaa", "ab", "aba", end="<stop>")),
    "overlapping": Pair(Tongue.of("ab", "abb", "ba"), Tongue.of("bb", "bba", "aa", end="<stop>")),
    "nested": Pair(Tongue.of("aa", "aaa", "ab"), Tongue.of("aa", "ba", "bab", end="<stop>")),
    **{f"random {seed}": random_pair(seed) for seed in (2, 3, 5, 8)},
}
TRAP, DIGITS = Tongue.of("57"), Tongue.of(end="<stop>")


def models(pair: Pair, seed: int = 0) -> tuple[TokenModel, TokenModel]:
    """One byte model as both sides see it."""
    texts = markov_texts("ab", 5, seed)
    return TokenModel(texts, pair.student.tokenize), TokenModel(texts, pair.teacher.tokenize)


def scored(pair: Pair, text: str, student: TokenModel, teacher: TokenModel):
    """The student's exact log-probabilities on a text, and the aligned pair."""
    student_ids = pair.student.ids(student.written[text])
    teacher_ids = pair.teacher.ids(teacher.written[text])
    rows = model_rows(pair.teacher, teacher, text)
    return model_rows(pair.student, student, text), compared(
        pair, student_ids, teacher_ids, rows, k=8
    )


@every_divergence
@pytest.mark.parametrize("name", PAIRS)
def test_one_byte_model_through_two_tokenizers_has_no_loss_and_no_gradient(
    name: str, divergence: str
) -> None:
    pair = PAIRS[name]
    student, teacher = models(pair)
    for text in student.texts:
        logprobs, comparison = scored(pair, text, student, teacher)
        logits = logprobs.clamp_min(-60).requires_grad_()
        output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
        output.per_token.sum().backward()
        assert logits.grad is not None
        # The student's rest is clamped to 1e-6 where the teacher has none.
        tolerance = 1e-5
        assert output.per_token.abs().max() < tolerance, text
        assert logits.grad.abs().max() < tolerance, text


@every_divergence
@pytest.mark.parametrize("name", PAIRS)
def test_one_byte_model_has_no_loss_behind_open_tokens(name: str, divergence: str) -> None:
    pair = PAIRS[name]
    student, teacher = models(pair)
    for text in student.texts:
        logprobs, comparison = scored(pair, text, student, teacher)
        comparison = with_lookaheads(pair, comparison, rows_of(pair.teacher, teacher))
        logits = logprobs.clamp_min(-60)
        output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
        assert output.per_token.abs().max() < 1e-5, text


@pytest.mark.parametrize("name", ["long student", "long teacher"])
def test_different_byte_models_have_a_loss(name: str) -> None:
    student, _ = models(PAIRS[name], seed=0)
    _, teacher = models(PAIRS[name], seed=1)
    for text in ("aab", "abab", "aaaa"):
        logprobs, comparison = scored(PAIRS[name], text, student, teacher)
        targets = PAIRS[name].targets([comparison])
        assert PAIRS[name].value(logprobs.clamp_min(-60), targets).per_token.sum() > 0.1


def of_rows(
    student: Tongue, teacher: Tongue, text: str, teacher_rows: list[dict[str, float]]
) -> tuple[Pair, AlignedPair]:
    """A text and its end on both sides, with the teacher's rows by token."""
    pair = Pair(student, teacher)
    width = teacher.family.logit_width
    rows = torch.full((len(teacher_rows), width), -torch.inf, dtype=torch.float64)
    for row, probabilities in zip(rows, teacher_rows, strict=True):
        ids = torch.tensor(teacher.ids(list(probabilities)))
        row[ids] = torch.tensor(list(probabilities.values()), dtype=torch.float64).log()
    student_ids = student.ids([*student.tokenize(text), END])
    teacher_ids = teacher.ids([*teacher.tokenize(text), END])
    return pair, compared(pair, student_ids, teacher_ids, rows, k=3)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_expected_loss_over_the_students_tokens_is_the_divergence_of_whole_tokens(
    divergence: str,
) -> None:
    # The teacher of digits gives only the first one of texts that the student did not sample.
    student = {"57": 0.1, "58": 0.15, "67": 0.6, "68": 0.15}
    first, second = {"5": 0.7, "6": 0.3}, {"5": {"7": 0.9, "8": 0.1}, "6": {"7": 0.2, "8": 0.8}}
    tongue = Tongue.of(*student)
    expected = 0.0
    for text, probability in student.items():
        rows = [first, second[text[0]], {END: 1.0}]
        pair, comparison = of_rows(tongue, DIGITS, text, rows)
        logits = torch.full((2, tongue.family.logit_width), -60.0, dtype=torch.float64)
        logits[0, tongue.ids([*student])] = torch.tensor([*student.values()]).double().log()
        logits[1, tongue.end] = 0.0
        output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
        expected += probability * float(output.per_token[0])
    teacher = {text: first[text[0]] * second[text[0]][text[1]] for text in student}
    sides = (teacher, student) if divergence == "forward_kl" else (student, teacher)
    exact = sum(sides[0][t] * math.log(sides[0][t] / sides[1][t]) for t in student)
    assert expected == pytest.approx(exact, abs=1e-5)


def test_the_worked_example_of_the_readme() -> None:
    student = {"57": 0.1, "58": 0.15, "67": 0.6, "68": 0.15}
    tongue = Tongue.of(*student)
    rows = [{"5": 0.7, "6": 0.3}, {"7": 0.9, "8": 0.1}, {END: 1.0}]
    pair, comparison = of_rows(tongue, DIGITS, "57", rows)
    logits = torch.full((2, tongue.family.logit_width), -60.0, dtype=torch.float64)
    logits[0, tongue.ids([*student])] = torch.tensor([*student.values()]).double().log()
    logits[1, tongue.end] = 0.0
    output = pair.value(logits, pair.targets([comparison]))
    first = 0.7 * math.log(0.7 / 0.25) + 0.3 * math.log(0.3 / 0.75)
    second = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)
    assert float(output.per_token[0]) == pytest.approx(first + 2.8 * second, abs=1e-5)
    assert float(output.per_token[0]) == pytest.approx(1.988, abs=1e-3)


def rows_behind(
    following: Mapping[str, Mapping[str, float]], teacher: Tongue = DIGITS
) -> Callable[[list[int]], Tensor]:
    """The rows of a teacher by the text before them; others are of the end."""

    def row(ids: list[int]) -> Tensor:
        text = b"".join(map(teacher.table.bytes_of, ids)).decode()
        values = following.get(text, {END: 1.0})
        result = torch.full((teacher.logit_width,), -torch.inf).double()
        result[teacher.ids([*values])] = torch.tensor([*values.values()]).double().log()
        return result

    return row


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("sampled", ["57", "58", "67", "68"])
def test_with_a_lookahead_every_sample_has_the_divergence_behind_an_open_token(
    sampled: str, is_forward: bool
) -> None:
    student = {"57": 0.1, "58": 0.15, "5": 0.2, "67": 0.5, "68": 0.05}
    first = {"5": 0.75, "6": 0.25}
    second = {"5": {"7": 0.7, "8": 0.1, "a": 0.2}, "6": {"7": 0.5, "8": 0.5}}
    tongue = Tongue.of("57", "58", "67", "68")
    rows = [first, second[sampled[0]], {END: 1.0}]
    pair, comparison = of_rows(tongue, DIGITS, sampled, rows)

    comparison = with_lookaheads(pair, comparison, rows_behind(second))
    assert comparison.lookaheads is not None
    assert len(comparison.lookaheads) == (sampled[0] != "5")
    logits = torch.full((2, tongue.logit_width), -60.0).double()
    logits[0, tongue.ids([*student])] = torch.tensor([*student.values()]).double().log()
    logits[1, tongue.end] = 0.0
    divergence = "forward_kl" if is_forward else "reverse_kl"
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)

    def nats(teacher: list[float], own: list[float]) -> float:
        total = sum(own)
        pairs = [(p, q / total) for p, q in zip(teacher, own, strict=True)]
        pairs = pairs if is_forward else [(q, p) for p, q in pairs]
        return sum(p * math.log(p / q) for p, q in pairs)

    expected = nats([0.75, 0.25], [0.45, 0.55])
    expected += (0.75 if is_forward else 0.45) * nats([0.7, 0.1, 0.2], [0.1, 0.15, 0.2])
    if sampled[0] == "6":  # not likely enough for a lookahead: weighs the ratio
        expected += (0.25 / 0.55 if is_forward else 1.0) * nats([0.5, 0.5], [0.5, 0.05])
    assert float(output.per_token[0]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("sampled", ["571", "572", "581", "671"])
def test_a_lookahead_continues_while_the_teacher_is_sure_of_the_next_token(
    sampled: str, is_forward: bool
) -> None:
    student = {"571": 0.05, "572": 0.2, "581": 0.15, "671": 0.6}
    following = {
        "": {"5": 0.75, "6": 0.25},
        "5": {"7": 0.8, "8": 0.2},
        "57": {"1": 0.6, "2": 0.4},
        "58": {"1": 1.0},
        "6": {"7": 1.0},
        "67": {"1": 1.0},
    }
    tongue = Tongue.of(*student)
    rows = [following[sampled[:length]] for length in range(3)]
    pair, comparison = of_rows(tongue, DIGITS, sampled, [*rows, {END: 1.0}])

    comparison = with_lookaheads(pair, comparison, rows_behind(following))
    assert comparison.lookaheads is not None
    lengths = [len(each.following) for each in comparison.lookaheads]
    assert lengths == {"671": [3], "581": [2], "571": [], "572": []}[sampled]
    logits = torch.full((2, tongue.logit_width), -60.0).double()
    logits[0, tongue.ids([*student])] = torch.tensor([*student.values()]).double().log()
    logits[1, tongue.end] = 0.0
    divergence = "forward_kl" if is_forward else "reverse_kl"
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    teacher = [
        math.prod(following[text[:length]].get(text[length], 0.0) for length in range(3))
        for text in student
    ]
    pairs = list(zip(teacher, student.values(), strict=True))
    exact = sum(p * math.log(p / q) if is_forward else q * math.log(q / p) for p, q in pairs)
    assert float(output.per_token[0]) == pytest.approx(exact, abs=1e-5)


def test_behind_a_token_that_could_have_been_longer_a_lookahead_compares_the_longer_ones() -> None:
    # The student stopped after 5, and its tokenizer would not have divided 571.
    student = Tongue.of("571", "572", without_merges=True)
    rows = [{"5": 1.0}, {"7": 0.9, "a": 0.1}, {END: 1.0}]
    pair, comparison = of_rows(student, DIGITS, "5a", rows)
    following = {"57": {"1": 0.2, "2": 0.8}}

    comparison = with_lookaheads(pair, comparison, rows_behind(following))
    assert comparison.lookaheads is not None
    assert [each.student_row for each in comparison.lookaheads] == [0]
    logits = torch.full((3, student.logit_width), -60.0).double()
    logits[0, student.ids(["5", "571", "572"])] = torch.tensor([0.4, 0.4, 0.2]).double().log()
    logits[1, student.ids(["a"])] = 0.0
    logits[2, student.end] = 0.0
    behind = pair.value(logits, pair.targets([comparison])).per_token[0]
    without = pair.value(logits, pair.targets([replace(comparison, lookaheads=())])).per_token[0]
    exact = 0.2 * math.log(0.2 / (2 / 3)) + 0.8 * math.log(0.8 / (1 / 3))
    assert float(behind - without) == pytest.approx(0.9 * exact, abs=1e-5)


@pytest.mark.parametrize("is_likely", [True, False])
def test_the_tokens_before_an_open_token_are_likely(is_likely: bool) -> None:
    first = {"5": 0.9, "6": 0.1} if is_likely else {"5": 0.1, "6": 0.9}
    rows = [first, {"7": 1.0}, {"1": 0.6, "2": 0.4}, {END: 1.0}]
    pair, comparison = of_rows(Tongue.of("571", "572"), DIGITS, "571", rows)
    sides = comparison.student, comparison.score, comparison.alignment
    tokens = pair.preparation.lookaheads.open_tokens.of(*sides, sampled=True)
    assert [token.text for token in tokens] == (["5", "7"] if is_likely else [])


@pytest.mark.parametrize("longer", [(), ("578", "579")])
def test_a_part_of_a_longer_token_is_not_in_every_sample(longer: tuple[str, ...]) -> None:
    student = Tongue.of("78", "79", *longer, without_merges=True)
    pair, texts = Pair(student, DIGITS), ["5", "7", "8", END]
    rows = torch.full((len(texts), DIGITS.logit_width), -torch.inf).double()
    rows[torch.arange(len(texts)), DIGITS.ids(texts)] = 0.0
    comparison = compared(pair, student.ids(["5", "78", END]), DIGITS.ids(texts), rows, k=3)
    sides = comparison.student, comparison.score, comparison.alignment
    tokens = pair.preparation.lookaheads.open_tokens.of(*sides, sampled=True)
    assert [token.text for token in tokens] == ([] if longer else ["7"])


@pytest.mark.parametrize("number", ["sieben", None])
def test_a_token_is_open_if_a_rare_token_of_the_student_continues_it(number: str | None) -> None:
    # After the teacher's space only numbers follow: it has the student's other words.
    # More tokens than FEW begin with the first one, which decides nothing.
    words = [" a", *(f" {first}{second}" for first in "ab" for second in "bcdefghijklmnopqrstu")]
    assert len(words) > TRIED
    student = Tongue.of(*words, *([f" {number}"] if number else []), without_merges=True)
    teacher = Tongue.of(*words, without_merges=True)
    pair, comparison = of_rows(student, teacher, "x", [{" ": 0.99, "x": 0.01}, {END: 1.0}])
    sides = comparison.student, comparison.score, comparison.alignment
    tokens = pair.preparation.lookaheads.open_tokens.of(*sides, sampled=False)
    assert [token.text for token in tokens] == ([" "] if number else [])


@pytest.mark.parametrize("is_sure", [True, False])
def test_text_that_the_student_spells_with_its_own_token_needs_no_bound(is_sure: bool) -> None:
    # The student's tokenizer divides `abca` as `ab|c|a`, and `abcd` is a token: `ab` may lead to
    # `c`, but not if `d` follows.
    student = Tongue.of("ab", "abcd", "abce", without_merges=True)
    teacher = Tongue.of("ab", without_merges=True)
    third = {"d": 0.99, "e": 0.01} if is_sure else {"d": 0.01, "a": 0.99}
    rows = [{"ab": 1.0}, {"c": 0.99, "a": 0.01}, third, {"b": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(student, teacher, "abcdb", rows)
    logits = torch.full((3, student.logit_width), -60.0).double()
    logits[0, student.ids(["abcd", "abce", "ab"])] = torch.tensor([0.2, 0.1, 0.7]).double().log()
    logits[1, student.ids(["b"])] = 0.0
    logits[2, student.end] = 0.0
    logits.requires_grad_()
    pair.value(logits, pair.targets([comparison])).per_token[0].backward()
    assert logits.grad is not None
    shorter = float(logits.grad[0, student.ids(["ab"])])
    assert (shorter > 0.3) == is_sure


@pytest.mark.parametrize("is_sure", [True, False])
@pytest.mark.parametrize("sampled", ["abcgb", "zb"])
def test_the_token_that_a_lookahead_ends_with_needs_no_bound(sampled: str, is_sure: bool) -> None:
    # As above, but the text that the teacher expects is not the sampled one.
    student = Tongue.of("ab", "abcde", "abcdf", "abcg", "bb", without_merges=True)
    teacher = Tongue.of("ab", without_merges=True)
    following = {
        "": {"ab": 0.6, "z": 0.4},
        "z": {"b": 1.0},
        "ab": {"c": 1.0},
        "abc": {"d": 0.99, "g": 0.01},
        "abcg": {"b": 1.0},
        "abcd": {"e": 0.99, "f": 0.01} if is_sure else {"e": 0.3, "a": 0.7},
        "abcde": {"b": 1.0},
    }
    texts = ["", "z"] if sampled == "zb" else ["", "ab", "abc", "abcg"]
    rows = [following[text] for text in texts]
    pair, comparison = of_rows(student, teacher, sampled, [*rows, {END: 1.0}])
    comparison = with_lookaheads(pair, comparison, rows_behind(following, teacher))
    logits = torch.full((3, student.logit_width), -60.0).double()
    tokens = student.ids(["abcde", "abcg", "z", "ab"])
    logits[0, tokens] = torch.tensor([0.2, 0.1, 0.1, 0.6]).double().log()
    logits[1, student.ids(["b"])] = 0.0
    logits[2, student.end] = 0.0
    logits.requires_grad_()
    targets = pair.targets([comparison])
    limits = [share for share in targets.missing.exp().flatten().tolist() if 0 < share < 1]
    # The others than abcde and the sampled abcg, of c, and of d after it.
    others = [1 - 0.99 * 0.99 - 0.01, 1 - 0.99] if sampled == "abcgb" else [1 - 0.99 * 0.99]
    unsure = [0.99] if sampled == "abcgb" else []
    assert limits == pytest.approx(others if is_sure else unsure, abs=1e-6)
    pair.value(logits, targets).per_token[0].backward()
    assert logits.grad is not None
    assert (float(logits.grad[0, tokens[-1]]) > 0.3) == is_sure


def test_what_continues_a_longer_token_is_not_of_the_token_that_a_lookahead_ends_with() -> None:
    student = Tongue.of("ab", "abcde", "abcdefg", "abcg", "bb", without_merges=True)
    teacher = Tongue.of("ab", without_merges=True)
    following = {
        "": {"ab": 0.6, "z": 0.4},
        "ab": {"c": 1.0},
        "abc": {"d": 0.99, "g": 0.01},
        "abcd": {"e": 0.99, "f": 0.01},
        "abcde": {"f": 0.4, "b": 0.6},
    }
    rows = [following[""], {"b": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(student, teacher, "zb", rows)
    comparison = with_lookaheads(pair, comparison, rows_behind(following, teacher))
    missing = pair.targets([comparison]).missing.exp()
    limits = [share for share in missing.flatten().tolist() if 0 < share < 1]
    assert limits == pytest.approx([1 - 0.99 * 0.99 * 0.6], abs=1e-6)


@every_divergence
def test_a_shorter_token_is_learned_where_the_teacher_ends_it(divergence: str) -> None:
    # `abca` is `ab|c|a`, so that `ab` could lead to `c`: but after `ab`, the teacher ends it.
    student = Tongue.of("ab", "abcd", "bb", without_merges=True)
    teacher = Tongue.of("ab", without_merges=True)
    following = {"": {"ab": 0.9, "z": 0.1}, "ab": {"b": 0.98, "c": 0.02}}
    rows = [following[""], {"b": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(student, teacher, "zb", rows)
    comparison = with_lookaheads(pair, comparison, rows_behind(following, teacher))
    logits = torch.full((3, student.logit_width), -60.0).double()
    tokens = student.ids(["ab", "abcd", "z"])
    logits[0, tokens] = torch.tensor([0.2, 0.7, 0.1]).double().log()
    logits[1, student.ids(["b"])] = 0.0
    logits[2, student.end] = 0.0
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token[0].backward()
    assert logits.grad is not None
    shorter, longer, _ = logits.grad[0, tokens].tolist()
    assert shorter < -0.05 < 0.05 < longer


@every_divergence
def test_a_token_that_may_lead_to_a_cell_is_not_learned_for_that(divergence: str) -> None:
    # ` sieben` is a token of the student, and ` siebx` is ` |sieb|x`: where its space could lead to
    # `sieb`, more of it would explain more of the teacher.
    student = Tongue.of(" sieben", " zwei", "sieb", "zw", without_merges=True)
    teacher = Tongue.of("sieb", "zw", "en", "ei")
    rows = [{" ": 1.0}, {"sieb": 0.9, "zw": 0.1}, {"ei": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(student, teacher, " zwei", rows)
    logits = torch.full((2, student.logit_width), -60.0, dtype=torch.float64)
    probabilities = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
    logits[0, student.ids([" sieben", " zwei", " "])] = probabilities.log()
    logits[1, student.end] = 0.0
    logits.requires_grad_()
    pair.value(logits, pair.targets([comparison]), divergence=divergence).per_token.sum().backward()
    assert logits.grad is not None
    seven, two, space = logits.grad[0, student.ids([" sieben", " zwei", " "])].tolist()
    assert seven < -0.1
    assert two > 0.1
    assert space > -1e-3


@every_divergence
def test_a_student_that_stopped_after_5_learns_the_7_of_a_teacher_with_57(divergence: str) -> None:
    # The teacher's next row, after its 5, expects the end; the probability of 7 is in the row
    # before, as that of 57.
    pair, comparison = of_rows(
        DIGITS, TRAP, "5", [{"57": 0.9, "5": 0.1}, {END: 0.98, "7": 0.01, "5": 0.01}]
    )
    logits = torch.full((2, DIGITS.family.logit_width), -12.0, dtype=torch.float64)
    logits[0, DIGITS.ids(["5"])] = 0.0
    logits[1, DIGITS.ids([END, "7", "5"])] = torch.tensor([3.0, 0, 0], dtype=torch.float64)
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token.sum().backward()
    assert logits.grad is not None
    seven, end = logits.grad[1, DIGITS.ids(["7", END])].tolist()
    assert seven < -1e-3 < 1e-3 < end
    # At the minimum the student gives 7 the mass 0.9 + 0.1 * 0.01, and the end 0.1 * 0.98.
    exact = torch.full((2, DIGITS.family.logit_width), -60.0, dtype=torch.float64)
    exact[0, DIGITS.ids(["5"])] = 0.0
    minimum = torch.tensor([0.901, 0.098, 0.001], dtype=torch.float64)
    exact[1, DIGITS.ids(["7", END, "5"])] = minimum.log()
    exact.requires_grad_()
    pair.value(exact, pair.targets([comparison]), divergence=divergence).per_token.sum().backward()
    assert exact.grad is not None
    assert exact.grad.abs().max() < 1e-5


@every_divergence
def test_a_student_with_57_that_stopped_after_5_learns_57(divergence: str) -> None:
    # The teacher has digits only and would continue with 7; the student's row after 5 is
    # conditioned on having stopped.
    pair, comparison = of_rows(TRAP, DIGITS, "5", [{"5": 1.0}, {"7": 0.9, END: 0.1}])
    logits = torch.full((2, TRAP.family.logit_width), -12.0, dtype=torch.float64)
    logits[0, TRAP.ids(["5", "57"])] = torch.tensor([3.0, 0], dtype=torch.float64)
    logits[1, TRAP.ids([END, "7"])] = torch.tensor([3.0, 0], dtype=torch.float64)
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token[1:].sum().backward()
    assert logits.grad is not None
    longer, shorter = logits.grad[0, TRAP.ids(["57", "5"])].tolist()
    assert longer < -1e-3
    assert shorter > 1e-3


def test_a_covering_token_counts_the_mass_of_ending_at_the_boundary_as_rest() -> None:
    pair, comparison = of_rows(DIGITS, TRAP, "57", [{"57": 0.6, "5": 0.3, "8": 0.1}, {END: 1.0}])
    targets = pair.targets([comparison])
    assert targets.positions.tolist() == [0, 1, 2]
    assert targets.cells[1].exp().sum().item() == pytest.approx(0.6 / 0.9)
    assert targets.rests[1].exp().item() == pytest.approx(0.3 / 0.9)
    assert targets.path_masses[1].item() == pytest.approx(0.9)


@every_divergence
def test_a_longer_token_that_the_teacher_begins_with_another_one_is_separate(
    divergence: str,
) -> None:
    # The teacher writes `inx)` with one token, and `in|x` before anything else: its `i` is never
    # the beginning of the student's `inx`.
    student = Tongue.of("in", "inx", without_merges=True)
    teacher = Tongue.of("in", "inx)", without_merges=True)
    assert teacher.tokenize("inxin") == ["in", "x", "in"]
    rows = [{"inx)": 0.985, "i": 0.015}, {END: 1.0}]
    pair, comparison = of_rows(student, teacher, "inx)", rows)
    logits = torch.full((3, student.logit_width), -12.0, dtype=torch.float64)
    logits[0, student.ids(["i", "inx"])] = torch.tensor([3.0, 0.0], dtype=torch.float64)
    logits[1, student.ids([")"])] = 0.0
    logits[2, student.end] = 0.0
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token.sum().backward()
    assert logits.grad is not None
    shorter, longer = logits.grad[0, student.ids(["i", "inx"])].tolist()
    assert longer < -0.05 < 0.05 < shorter


@every_divergence
@pytest.mark.parametrize("sampled", ["14", "1"])
def test_a_shorter_token_of_the_teacher_excludes_longer_ones(sampled: str, divergence: str) -> None:
    # The teacher writes "1" and "14" after a space as " 1" and " |14": " 1" excludes "14" and
    # "15", but not "140", which it writes as " 1|40".
    student = Tongue.of("14", "15", "140", by_merges=True)
    teacher = Tongue.of("40", "14", "15", " 1", by_merges=True)
    assert [teacher.tokenize(t) for t in (" 14", " 140")] == [[" ", "14"], [" 1", "40"]]
    first = {" 1": 0.9, " ": 0.1}
    rows = [first, {"14": 1.0}] if sampled == "14" else [first]
    pair, comparison = of_rows(student, teacher, f" {sampled}", [*rows, {END: 1.0}])
    logits = torch.full((3, student.family.logit_width), -12.0, dtype=torch.float64)
    logits[0, student.ids([" "])] = 0.0
    tokens = student.ids(["1", "14", "15", "140"])
    logits[1, tokens] = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    logits[2, student.ids([END])] = 0.0
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token[1].backward()
    assert logits.grad is not None
    shortest, fourteen, fifteen, longest = logits.grad[1, tokens].tolist()
    assert shortest < -1e-2 < 1e-2 < fifteen
    assert shortest == pytest.approx(longest)
    assert (fourteen == pytest.approx(fifteen)) == (sampled == "1")


def test_a_longer_token_is_in_the_cell_that_some_continuation_leads_to() -> None:
    # "abc" is "ab|c" for the student and "a|bc" for the teacher: "a" includes "ab".
    student = Tongue.of("ab", by_merges=True)
    teacher = Tongue.of("bc", "ab", by_merges=True)
    assert teacher.tokenize("abc") == ["a", "bc"]
    pair, comparison = of_rows(student, teacher, "a", [{"a": 0.9, "c": 0.1}, {END: 1.0}])
    logits = torch.full((2, student.family.logit_width), -12.0, dtype=torch.float64)
    tokens = student.ids(["a", "ab", "c"])
    logits[0, tokens] = torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64)
    logits.requires_grad_()
    pair.value(logits, pair.targets([comparison])).per_token[0].backward()
    assert logits.grad is not None
    short, longer, other = logits.grad[0, tokens].tolist()
    assert short == pytest.approx(longer)
    assert short < -1e-2 < 1e-2 < other


@pytest.mark.parametrize("without_merges", [True, False])
def test_a_token_that_the_student_never_writes_decides_no_candidate(without_merges: bool) -> None:
    # The teacher has one token for a line break and two letters. If the student's vocabulary has it
    # but the tokenizer never writes it, the student's line break has the same text.
    student = Tongue.of("\nxy", without_merges=without_merges)
    student = Tongue(student.family, student.family.encoder)
    teacher = Tongue.of("\nxy", by_merges=True)
    pair, comparison = of_rows(
        student, teacher, "cb", [{"c": 1.0}, {"b": 0.5, "\nxy": 0.5}, {END: 1.0}]
    )
    logits = torch.full((3, student.family.logit_width), -30.0, dtype=torch.float64)
    written = "\n" if without_merges else "\nxy"
    logits[1, student.ids(["b", written])] = 0.0
    logits[0, student.ids(["c"])] = 0.0
    logits[2, student.ids([END])] = 0.0
    output = pair.value(logits, pair.targets([comparison]))
    assert output.per_token.max().item() < 1e-4


@pytest.mark.parametrize(("word", "agrees"), [("xyz", True), ("xac", False)])
def test_a_piece_of_the_teacher_decides_between_whole_words_of_the_student(
    word: str, agrees: bool
) -> None:
    # The student has no token for the beginning of a word, and spells it in letters.
    student, teacher = Tongue.of("xyz", "xac", without_merges=True), Tongue.of("xy", "xa")
    assert [student.tokenize(text) for text in ("xy", "xyz")] == [["x", "y"], ["xyz"]]
    pair, comparison = of_rows(
        student, teacher, "cb", [{"c": 1.0}, {"b": 0.5, "xy": 0.5}, {END: 1.0}]
    )
    logits = torch.full((3, student.family.logit_width), -30.0, dtype=torch.float64)
    logits[0, student.ids(["c"])] = 0.0
    logits[1, student.ids(["b", word])] = 0.0
    logits[2, student.ids([END])] = 0.0
    output = pair.value(logits, pair.targets([comparison]))
    assert output.per_token.max().item() < 1e-4 if agrees else output.per_token.max().item() > 5


def test_white_space_that_joins_the_next_word_of_the_student_is_no_part_of_a_cell() -> None:
    # Two spaces and a letter are "  |a" for the teacher and " | a" for the student.
    student, teacher = Tongue.of(" a", "  ", by_merges=True), Tongue.of("  ", by_merges=True)
    assert [side.tokenize("  a") for side in (student, teacher)] == [[" ", " a"], ["  ", "a"]]
    pair, comparison = of_rows(student, teacher, "b", [{"b": 0.5, "  ": 0.5}, {END: 1.0}])
    logits = torch.full((2, student.family.logit_width), -30.0, dtype=torch.float64)
    logits[0, student.ids(["b", " "])] = 0.0
    logits[1, student.ids([END])] = 0.0
    output = pair.value(logits, pair.targets([comparison]))
    assert output.per_token.max().item() < 1e-4


#: Inside 191 and 192 the teacher decides whether 19 ends: no token of the student has its comma.
NINETEENS, TENS = Tongue.of("19", "191", "192"), Tongue.of("19", end="<stop>")


@every_divergence
def test_a_student_with_longer_tokens_learns_the_token_that_the_teacher_ends(
    divergence: str,
) -> None:
    rows = [{"19": 1.0}, {",": 0.98, "2": 0.02}, {",": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(NINETEENS, TENS, "192,", rows)
    logits = torch.full((3, NINETEENS.logit_width), -20.0, dtype=torch.float64)
    logits[0, NINETEENS.ids(["192", "191", "19"])] = torch.tensor([0.0, 0.0, -4.0]).double()
    logits[1, NINETEENS.ids([","])] = 0.0
    logits[2, NINETEENS.ids([END])] = 0.0
    logits.requires_grad_()
    output = pair.value(logits, pair.targets([comparison]), divergence=divergence)
    output.per_token.sum().backward()
    assert logits.grad is not None
    other, short = logits.grad[0, NINETEENS.ids(["191", "19"])].tolist()
    assert short < -1e-3 < 1e-3 < other


@pytest.mark.parametrize(("share", "agrees"), [(0.93, True), (0.98, True), (0.8, False)])
def test_unlikely_texts_may_end_the_token_too(share: float, agrees: bool) -> None:
    # 0.05 of the teacher's mass is outside its top-k: perhaps another text after 19.
    rows = [{"19": 1.0}, {",": 0.93, "2": 0.02}, {",": 1.0}, {END: 1.0}]
    pair, comparison = of_rows(NINETEENS, TENS, "192,", rows)
    logits = torch.full((3, NINETEENS.logit_width), -60.0, dtype=torch.float64)
    masses = torch.tensor([0.02, 0.98 - share, share], dtype=torch.float64)
    logits[0, NINETEENS.ids(["192", "191", "19"])] = (masses + 1e-12).log()
    logits[1, NINETEENS.ids([","])] = 0.0
    logits[2, NINETEENS.ids([END])] = 0.0
    nats = pair.value(logits, pair.targets([comparison])).per_token[0].item()
    assert (nats < 1e-3) == agrees
