"""Boundaries of prefix KL: differing texts, control tokens, partial characters, weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_losses.alignment import byte_strings
from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import PrefixKlConfig
from mopd_losses.core import blockwise_head as head_module
from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.prefix.loss import PrefixKlLoss
from mopd_losses.prefix.naming import cuts
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.preparation import Preparation
from mopd_losses.prefix.targets import PrefixTargets
from mopd_losses.prefix.vocabulary import marks, sorted_vocabulary
from mopd_protocol.errors import DataError
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenRoles
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.families import Family, family, family_of, made_of
from tests.losses.prefix_pairs import Pair, Tongue, compared
from tests.reference.text_model import END

PAIR = Pair(Tongue.of("57", "573", "ab"), Tongue.of("73", "b5", end="<stop>"))


def completion(
    pair: Pair, student_ids: list[int], teacher_ids: list[int], k: int = 5
) -> AlignedPair:
    """A completion with a random teacher."""
    torch.manual_seed(0)
    side = pair.teacher.family
    real = torch.tensor(side.table.real_ids(side.logit_width))
    rows = torch.randn(len(teacher_ids), side.logit_width, dtype=torch.float64) * 4
    rows = rows.masked_fill(~real, -torch.inf).log_softmax(dim=1)
    return compared(pair, student_ids, teacher_ids, rows, k)


def of_texts(student: list[str], teacher: list[str], pair: Pair = PAIR) -> AlignedPair:
    return completion(pair, pair.student.ids(student), pair.teacher.ids(teacher))


def random_logits(pair: Pair, tokens: int) -> Tensor:
    torch.manual_seed(0)
    width = pair.student.family.logit_width
    return torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)


def of_families(student: str, teacher: str) -> Pair:
    sides = [family(student), family(teacher)]
    return Pair(*(Tongue(side, side.encoder) for side in sides))


def test_differing_texts_are_compared_in_every_common_block() -> None:
    # The teacher's tokenizer normalises U+2126 (3 bytes) to U+03A9 (2 bytes).
    student, teacher = family("digit"), family("whole_number")
    after = " is the unit of 12 things, and the quick brown fox jumps over the lazy dog"
    texts = "\u2126" + after, "\u03a9" + after
    sequences = [
        side.table.sequence(side.encoder.encode(text))
        for side, text in zip((student, teacher), texts, strict=True)
    ]
    rows = len(sequences[1])
    sampled = np.full(rows, -0.1, dtype=np.float32)
    topk = TopKLogprobs(
        ids=sequences[1].token_ids[:, None],
        logprobs=sampled[:, None],
        token_logprobs=sampled,
        tail_logprobs=np.full(rows, np.log1p(-np.exp(-0.1)), dtype=np.float32),
    )
    pair = AlignedPair(
        sequences[0], None, TeacherScore("teacher", sequences[1], topk), align(*sequences)
    )
    sides_of_pair = student.table, student.encoder, teacher.table, teacher.encoder
    preparation = Preparation(TokenizerPair(*sides_of_pair))
    targets = preparation.targets([pair], [0], mass_floor=0.1)
    ends = sequences[0].byte_ends.tolist()
    in_symbol = [position for position, end in enumerate(ends) if end <= 3]
    compared_positions = set(targets.positions.tolist())
    assert compared_positions >= set(range(len(ends))) - set(in_symbol)


def test_texts_that_differ_from_the_first_byte_have_no_boundary() -> None:
    targets = PAIR.targets([of_texts(["a", "b"], ["5", "7"])])
    assert len(targets.positions) == 0
    output = PAIR.value(random_logits(PAIR, 2), targets)
    assert output.per_token.tolist() == [0, 0]
    assert output.per_token.requires_grad


def test_texts_that_differ_from_the_first_byte_have_no_open_token() -> None:
    comparison = replace(of_texts(["57"], ["b5"]), lookaheads=())
    sure = TopKLogprobs(
        ids=comparison.score.completion.token_ids[:, None],
        logprobs=np.zeros((1, 1), dtype=np.float32),
        token_logprobs=np.zeros(1, dtype=np.float32),
        tail_logprobs=np.full(1, -np.inf, dtype=np.float32),
    )
    comparison = replace(comparison, score=replace(comparison.score, topk=sure))
    assert len(PAIR.targets([comparison]).positions) == 0


def test_an_end_of_turn_is_a_cell_that_only_an_end_of_turn_feeds() -> None:
    ids = PAIR.student.ids(["57", END]), PAIR.teacher.ids(["5", "7", END])
    targets = PAIR.targets([completion(PAIR, *ids, k=PAIR.teacher.end + 1)])
    assert targets.positions.tolist() == [0, 0, 1]
    last = targets.named.boundaries == 2
    sorted_ids = PAIR.preparation.student.ids
    ranges = torch.stack([targets.named.starts[last], targets.named.stops[last]], dim=1)
    fed = [sorted_ids[start:stop].tolist() for start, stop in ranges.tolist()]
    assert [PAIR.student.end] in fed
    assert sum(PAIR.student.end in tokens for tokens in fed) == 1


def test_a_completion_cut_by_length_has_no_boundary_after_its_last_token() -> None:
    targets = PAIR.targets([of_texts(["57"], ["5", "7"])])
    assert targets.positions.tolist() == [0, 0]


def test_a_completion_may_end_inside_a_character() -> None:
    pair = of_families("digit", "sentencepiece")
    half = pair.student.family.table.all_bytes.index("ï".encode()[:1])
    student_ids = [*pair.student.encoder.encode("na"), half]
    teacher_ids = pair.teacher.encoder.encode("na\ufffd")
    targets = pair.targets([completion(pair, student_ids, teacher_ids)])
    logits = random_logits(pair, len(student_ids))
    output = pair.value(logits, targets)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
    assert output.per_token.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("student", ["digit", "whole_number", "sentencepiece"])
@pytest.mark.parametrize("teacher", ["digit", "whole_number", "sentencepiece"])
def test_tokenizers_of_every_kind_can_be_compared(student: str, teacher: str) -> None:
    pair = of_families(student, teacher)
    text = "The sum of 128 and 7 is 135. naïve 的 \n  x"
    ids = [
        tongue.encoder.encode(text) + list(tongue.table.roles.ending[:1])
        for tongue in (pair.student, pair.teacher)
    ]
    comparison = completion(pair, ids[0], ids[1], k=12)
    targets = pair.targets([comparison])
    assert len(targets.positions) >= len(comparison.alignment)
    logits = random_logits(pair, len(ids[0]))
    output = pair.value(logits, targets)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), logits)
    assert (output.per_token >= -1e-6).all()
    assert (gradient.abs().sum(dim=1) > 0).double().mean() > 0.8


def with_names(*names: str) -> Family:
    side = made_of("ab")
    side.tokenizer.add_special_tokens(list(names))
    return family_of(side.tokenizer, TokenRoles(end_of_turn=side.tokenizer.token_to_id(names[0])))


def test_control_tokens_are_matched_by_role_or_name() -> None:
    sides = with_names("<over>", "<tool>", "<first>"), with_names("<stop>", "<tool>", "<second>")
    tables = [side.table for side in sides]
    characters = byte_strings.control_characters(*tables)
    student, teacher = (sorted_vocabulary.SortedVocabulary(table, characters) for table in tables)

    def strings(first: str, second: str) -> tuple[str, str]:
        ids = tables[0].controls[first], tables[1].controls[second]
        return student.strings[ids[0]], teacher.strings[ids[1]]

    assert len({*strings("<over>", "<stop>")}) == 1
    assert len({*strings("<tool>", "<tool>")}) == 1
    assert len({*strings("<first>", "<second>"), *strings("<tool>", "<tool>")}) == 3


def test_a_boundary_that_the_teacher_hardly_reaches_weighs_less() -> None:
    pair = Pair(Tongue.of(), Tongue.of("57", end="<stop>"))
    rows = torch.full((2, pair.teacher.family.logit_width), -torch.inf, dtype=torch.float64)
    rows[0, pair.teacher.ids(["8", "57"])] = torch.tensor([0.999, 0.001]).double().log()
    rows[1, pair.teacher.ids([END])] = 0.0
    student_ids = pair.student.ids(["5", "7", END])
    comparison = compared(pair, student_ids, pair.teacher.ids(["57", END]), rows, k=2)
    logits = random_logits(pair, 3)
    full = pair.value(logits, pair.targets([comparison], mass_floor=0.0))
    less = pair.value(logits, pair.targets([comparison], mass_floor=0.01))
    assert less.measured["path_mass"].tolist() == pytest.approx([1, 0.001, 1])
    assert less.measured["path_weight"].tolist() == pytest.approx([1, 0.1, 1])
    torch.testing.assert_close(less.per_token, full.per_token * torch.tensor([1, 0.1, 1]))


def test_a_row_stays_open_while_a_longer_token_is_possible() -> None:
    pair = Pair(Tongue.of("573"), Tongue.of(end="<stop>"))
    targets = pair.targets([of_texts(["5", "7", "3", "a"], ["5", "7", "3", "a"], pair)])
    assert targets.positions.tolist() == [0, 1, 2, 3]
    assert targets.first_positions.tolist() == [0, 0, 0, 3]
    # The path over 5 to the second row, and over 5 and 7 to the third.
    assert targets.step_ids.tolist() == pair.student.ids(["5", "5", "7"])


def test_targets_are_cut_into_parts_with_the_same_values() -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    targets: PrefixTargets = PAIR.loss().targets([comparison, comparison], [0, 4]).to("cpu")
    logits = random_logits(PAIR, 8).detach()
    total = PAIR.value(logits, targets).per_token
    parts = [PAIR.value(logits[a:b], targets.between(a, b)).per_token for a, b in ((0, 4), (4, 8))]
    torch.testing.assert_close(torch.cat(parts), total)
    uncuttable = targets.uncuttable(8)
    assert not bool(uncuttable[0] | uncuttable[4] | uncuttable[8])


def test_ranges_are_summed_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    loss = PAIR.loss()
    targets = loss.targets([comparison], [0])
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(PAIR.student.family.logit_width, 3, dtype=torch.float64)
    results: list[tuple[Tensor, Tensor]] = []
    for members in (1, 3, 1 << 20):
        monkeypatch.setattr(head_module, "_RANGE_MEMBERS", members)
        term = LossTerm(loss, targets, torch.ones(4, dtype=torch.float64))
        total, _ = blockwise_head(hidden, Head(weight, PAIR.real_ids), [term])
        results.append((total, torch.autograd.grad(total, hidden)[0]))
    for total, gradient in results[1:]:
        torch.testing.assert_close(total, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_full_caches_are_cleared_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    logits = random_logits(PAIR, 4).detach()
    expected = PAIR.value(logits, PAIR.targets([comparison])).per_token
    monkeypatch.setattr(sorted_vocabulary, "_CACHED_RANGES", 1)
    monkeypatch.setattr(cuts, "CACHED_CUTS", 1)
    monkeypatch.setattr(marks, "_MOST_MARKS", 0)
    pair = Pair(PAIR.student, PAIR.teacher)
    for _ in range(2):
        assert torch.equal(pair.value(logits, pair.targets([comparison])).per_token, expected)


def test_a_temperature_applies_to_the_student_and_scales_the_value() -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    logits = random_logits(PAIR, 4).detach()

    def loss(temperature: float) -> Any:
        config = PrefixKlConfig(mass_floor=0.0)
        return PrefixKlLoss(PAIR.preparation, config, temperature=temperature)

    targets = loss(1.0).targets([comparison], [0])
    warm = loss(2.0)(DenseRows(logits, PAIR.real_ids), targets).per_token
    halved = loss(1.0)(DenseRows(logits / 2, PAIR.real_ids), targets).per_token
    torch.testing.assert_close(warm, halved * 4)


def test_a_head_narrower_than_the_tokenizer_is_an_error() -> None:
    size = PAIR.student.family.table.size
    rows = DenseRows(torch.zeros(0, size - 1), torch.ones(size - 1, dtype=torch.bool))
    with pytest.raises(DataError) as caught:
        PAIR.loss()(rows, PAIR.targets([], []))
    assert caught.value.key == "student"
    assert str(size) in str(caught.value)


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_a_mass_floor_outside_zero_to_one_is_an_error(floor: float) -> None:
    with pytest.raises(ValueError, match="mass_floor"):
        PrefixKlConfig(mass_floor=floor)
