"""Prefix KL at the ends of things: nothing written, other texts, half characters, huge logits."""

import pytest
import torch
from torch import Tensor

from mopd_losses.config import PrefixKlConfig
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.prefix import shared_units, spelling
from mopd_losses.prefix.loss import prefix_kl
from mopd_losses.prefix.shared_units import NO_UNIT, SharedUnits
from mopd_losses.prefix.spelling import Spelling
from mopd_losses.prefix.targets import PrefixTargets
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_table import TokenRoles
from tests.losses.families import Family, family, family_of, made_of
from tests.losses.prefix_pairs import LongestMatch, Pair, Tongue, compared, ids_read
from tests.reference.text_model import END

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
every = pytest.mark.parametrize("divergence", DIVERGENCES)

PAIR = Pair(Tongue.of("57", "573", "ab"), Tongue.of("73", "b5", end="<stop>"))


def completion(
    pair: Pair, student_ids: list[int], teacher_ids: list[int], k: int = 5, seed: int = 0
) -> AlignedPair:
    """With a random teacher."""
    torch.manual_seed(seed)
    family = pair.teacher.family
    real = torch.tensor(family.table.real_ids(family.logit_width))
    rows = torch.randn(len(teacher_ids), family.logit_width, dtype=torch.float64) * 4
    rows = rows.masked_fill(~real, -torch.inf).log_softmax(dim=1)
    return compared(pair, student_ids, teacher_ids, rows, k)


def of_texts(student: list[str], teacher: list[str], pair: Pair = PAIR) -> AlignedPair:
    return completion(pair, pair.student.ids(student), pair.teacher.ids(teacher))


def random_logits(pair: Pair, tokens: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(
        tokens, pair.student.family.logit_width, dtype=torch.float64, requires_grad=True
    )


def boundaries(targets: PrefixTargets) -> int:
    return len(targets.positions)


@every
@pytest.mark.parametrize("several", [0, 1, 2])
def test_completions_of_no_tokens_cost_nothing_and_keep_their_graph(
    divergence: str, several: int
) -> None:
    targets = PAIR.targets([of_texts([], [])] * several, [0] * several)
    logits = random_logits(PAIR, 3)
    found = PAIR.value(logits, targets, divergence=divergence)
    assert found.per_token.tolist() == [0, 0, 0]
    assert {len(values) for values in found.measured.values()} == {0}
    found.per_token.sum().backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()
    empty = PAIR.value(random_logits(PAIR, 0), targets, divergence=divergence)
    assert empty.per_token.shape == (0,)
    assert empty.per_token.requires_grad


def test_texts_that_differ_are_compared_as_far_as_both_have_read_the_same() -> None:
    whole = PAIR.targets([of_texts(["ab", "57", "a", END], ["a", "b5", "7", "a", END])])
    other = PAIR.targets([of_texts(["ab", "57", "a", END], ["a", "b5", "73", "a", END])])
    # The text differs after a b 5 7; before that all boundaries are the same ones.
    assert other.positions.tolist() == [
        position for position in whole.positions.tolist() if position < 3
    ]
    assert boundaries(PAIR.targets([of_texts(["a", "b"], ["5", "7"])])) == 1
    nothing = PAIR.targets([of_texts(["a"], [])])
    assert boundaries(nothing) == 0
    value = PAIR.value(random_logits(PAIR, 1), nothing).per_token
    assert value.tolist() == [0]
    assert value.requires_grad


def test_an_end_of_turn_is_an_event_and_only_meets_an_end_of_turn() -> None:
    comparison = of_texts(["57", END], ["5", "7", END])
    targets = PAIR.targets([comparison])
    last = int(targets.positions[-1])
    assert last == 1
    places, _, positions, ids, _ = ids_read(targets, targets.named).T
    ends = ids[(places == boundaries(targets) - 1) & (positions == last)] == PAIR.student.end
    topk = comparison.score.topk
    teacher_names_it = PAIR.teacher.end in topk.ids[-1].tolist()
    assert bool(ends.any()) == teacher_names_it
    student, teacher = PAIR.units.student.units, PAIR.units.teacher.units
    assert student[PAIR.student.end] == teacher[PAIR.teacher.end] != NO_UNIT
    assert (student == student[PAIR.student.end]).sum() == 1


def test_a_completion_cut_by_length_has_no_place_after_its_last_token() -> None:
    ids = PAIR.student.ids(["57", END]), PAIR.teacher.ids(["5", "7", END])
    everything = PAIR.teacher.end + 1
    ended = PAIR.targets([completion(PAIR, *ids, k=everything)])
    assert ended.positions.tolist() == [0, 0, 1]
    cut = PAIR.targets([completion(PAIR, ids[0][:-1], ids[1][:-1], k=everything)])
    assert cut.positions.tolist() == [0, 0]


def test_a_completion_may_end_inside_a_character() -> None:
    sides = [family("digit"), family("sentencepiece")]
    pair = Pair(*(Tongue(side, side.encoder) for side in sides))
    table = pair.student.family.table
    half = [table.all_bytes.index(bytes([byte])) for byte in "ï".encode()[:1]]
    student_ids = [*pair.student.encoder.encode("na"), *half]
    read = "na\ufffd"  # what a teacher makes of it
    comparison = completion(pair, student_ids, pair.teacher.encoder.encode(read))
    targets = pair.targets([comparison])
    start_of_half = len(student_ids) - 1
    assert targets.positions.max().item() == start_of_half
    logits = random_logits(pair, len(student_ids))
    found = pair.value(logits, targets).per_token
    found.sum().backward()
    assert found.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("student", ["digit", "whole_number", "sentencepiece"])
@pytest.mark.parametrize("teacher", ["digit", "whole_number", "sentencepiece"])
def test_real_tokenizers_of_every_kind_can_be_compared(student: str, teacher: str) -> None:
    sides = [family(student), family(teacher)]
    pair = Pair(*(Tongue(side, side.encoder) for side in sides))
    text = "The sum of 128 and 7 is 135. naïve 的 \n  x"
    written = [side.encoder.encode(text) + list(side.table.roles.ending[:1]) for side in sides]
    comparison = completion(pair, *written, k=12)
    targets = pair.targets([comparison])
    assert boundaries(targets) >= len(comparison.alignment)
    logits = random_logits(pair, len(written[0]))
    for divergence in DIVERGENCES:
        found = pair.value(logits, targets, divergence=divergence)
        (gradient,) = torch.autograd.grad(found.per_token.sum(), logits)
        assert (found.per_token >= -1e-5).all()
        assert gradient.isfinite().all()
        reached = gradient.abs().sum(dim=1) > 0
        assert reached.double().mean() > 0.8


@every
@pytest.mark.parametrize("size", [60.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(divergence: str, size: float, dtype: torch.dtype) -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    targets = PAIR.targets([comparison], mass_floor=1e-4)
    for sure_of in ("5", "57", "573", END):
        logits = torch.zeros(4, PAIR.student.family.logit_width, dtype=dtype)
        logits[:, PAIR.student.ids([sure_of])] = size
        logits.requires_grad_()
        found = PAIR.value(logits, targets, divergence=divergence, mass_floor=1e-4)
        found.per_token.sum().backward()
        assert found.per_token.isfinite().all()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
        for name, values in found.measured.items():
            assert values.isfinite().all(), name
            assert (values >= -1e-6).all(), name
            assert (values <= 1 + 1e-6).all(), name


@every
def test_tokens_that_a_student_or_a_teacher_rules_out_leave_no_nan(divergence: str) -> None:
    torch.manual_seed(1)
    teacher = torch.full((4, PAIR.teacher.family.logit_width), -torch.inf, dtype=torch.float64)
    read = PAIR.teacher.ids(["a", "b5", "73", END])
    for row, token in zip(teacher, read, strict=True):
        row[token] = 0.0  # nothing else, so the other entries of the top-k are absent
    student_ids = PAIR.student.ids(["ab", "573", END])
    targets = PAIR.targets([compared(PAIR, student_ids, read, teacher, k=4)])
    for ruled_out in (["5", "57"], ["ab", "a"], ["573"], [END]):
        logits = torch.randn(3, PAIR.student.family.logit_width, dtype=torch.float64)
        logits[:, PAIR.student.ids(ruled_out)] = -torch.inf
        logits.requires_grad_()
        found = PAIR.value(logits, targets, divergence=divergence)
        found.per_token.sum().backward()
        assert found.per_token.isfinite().all(), ruled_out
        assert logits.grad is not None
        assert logits.grad.isfinite().all(), ruled_out


def test_where_the_teacher_did_not_find_the_way_a_place_weighs_less() -> None:
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
    expected = full.per_token * torch.tensor([1, 0.1, 1])
    torch.testing.assert_close(less.per_token, expected)


def with_names(side: Family, *names: str) -> Family:
    side.tokenizer.add_special_tokens(list(names))
    end = side.tokenizer.token_to_id(names[0])
    return family_of(side.tokenizer, TokenRoles(end_of_turn=end))


def test_control_tokens_meet_by_role_or_name() -> None:
    def named(*names: str) -> Family:
        return with_names(made_of("ab"), *names)

    sides = [named("<over>", "<tool>", "<mine>"), named("<stop>", "<tool>", "<yours>")]
    tables = [side.table for side in sides]
    units = SharedUnits(tables[0], sides[0].encoder, tables[1], sides[1].encoder)

    def unit(side: int, name: str) -> int:
        of_side = units.sides[side].units
        return int(of_side[tables[side].controls[name]])

    assert unit(0, "<over>") == unit(1, "<stop>") != NO_UNIT
    assert unit(0, "<tool>") == unit(1, "<tool>") not in (NO_UNIT, unit(0, "<over>"))
    assert unit(0, "<mine>") == unit(1, "<yours>") == NO_UNIT
    ids = [[tables[s].controls["<tool>"], *sides[s].encoder.encode("ab")] for s in (0, 1)]
    pair = Pair(*(Tongue(side, side.encoder) for side in sides))
    targets = pair.targets([completion(pair, ids[0], ids[1])])
    assert targets.positions.tolist() == [0, 1]


def test_targets_move_and_are_cut_as_one() -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    loss = PAIR.loss()
    targets = loss.targets([comparison, comparison], [0, 4]).to("cpu")
    logits = random_logits(PAIR, 8).detach()
    whole = PAIR.value(logits, targets).per_token
    parts = [PAIR.value(logits[a:b], targets.between(a, b)).per_token for a, b in ((0, 4), (4, 8))]
    torch.testing.assert_close(torch.cat(parts), whole)
    held = targets.uncuttable(8)
    assert not bool(held[0] | held[4] | held[8])


def test_a_token_that_could_have_been_longer_is_not_forgotten_however_long_ago() -> None:
    # Digits written one by one by a student that knows 573: its first row is open until the end.
    pair = Pair(Tongue.of("573"), Tongue.of(end="<stop>"))
    targets = pair.targets([of_texts(["5", "7", "3", "a"], ["5", "7", "3", "a"], pair)])
    assert targets.positions.tolist() == [0, 1, 2, 3]
    assert targets.first_positions.tolist() == [0, 0, 0, 3]
    # By way of 5 and of 7, to the third row; and by way of 5 to the second, twice.
    assert targets.step_ids.tolist() == pair.student.ids(["5", "5", "7"])


@pytest.mark.parametrize("floor", [-0.1, 1.1])
def test_a_floor_outside_zero_to_one_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="mass_floor"):
        PrefixKlConfig(mass_floor=floor)


def test_spelling_is_asked_once_for_each_string() -> None:
    asked: list[str] = []

    class Counted:
        def encode(self, text: str) -> list[int]:
            return self.encode_batch([text])[0]

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            asked.extend(texts)
            return [PAIR.student.encoder.encode(text) for text in texts]

    counted = Spelling(PAIR.student.family.table, Counted())  # type: ignore[arg-type]
    assert counted.pieces("5731") == ("573", "1")
    counted.learn(["5731", "57", "57"])
    assert counted.pieces("57") == ("57",)
    assert counted.inner_boundaries("5731") == [3]
    assert counted.pieces("\xe7\x9a") == ("\xe7", "\x9a")  # half a character is never asked for
    assert asked == ["5731", "57"]


def test_a_head_that_is_narrower_than_the_tokenizer_is_refused() -> None:
    size = PAIR.student.family.table.size
    rows = DenseRows(torch.zeros(0, size - 1), torch.ones(size - 1, dtype=torch.bool))
    with pytest.raises(DataError, match=f"logits of width {size - 1} for a tokenizer of {size}"):
        PAIR.loss()(rows, PAIR.targets([], []))


def test_what_is_forgotten_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    logits = random_logits(PAIR, 4).detach()
    expected = PAIR.value(logits, PAIR.targets([comparison])).per_token
    monkeypatch.setattr(shared_units, "MOST_REMEMBERED", 0)
    monkeypatch.setattr(spelling, "MOST_REMEMBERED", 0)
    forgetful = Pair(PAIR.student, PAIR.teacher)
    for _ in range(2):
        found = forgetful.value(logits, forgetful.targets([comparison])).per_token
        assert torch.equal(found, expected)


def test_with_too_many_ways_to_go_on_a_unit_is_left_in_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The student says 7 after 5 with 57, and 73 may follow: 7 and 73 are one event, or none.
    comparison = completion(
        PAIR, PAIR.student.ids(["5", "7"]), PAIR.teacher.ids(["5", "7"]), k=PAIR.teacher.end + 1
    )
    before = PAIR.targets([comparison]).events[1].isfinite().sum()
    monkeypatch.setattr(shared_units, "MOST_EXTENSIONS", -1)
    strict = Pair(PAIR.student, PAIR.teacher)
    after = strict.targets([comparison]).events[1].isfinite().sum()
    assert after < before
    logits = random_logits(PAIR, 2).detach()
    assert strict.value(logits, strict.targets([comparison])).per_token.isfinite().all()


def test_a_unit_that_too_many_tokens_begin_with_is_left_in_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spellings = ["ab", "abc", "abcd"]
    sides = Tongue.of(*spellings), Tongue.of(end="<stop>")
    comparison = completion(
        Pair(*sides), sides[0].ids(["ab"]), sides[1].ids(["a", "b"]), k=sides[1].end + 1
    )

    def first_events(pair: Pair) -> tuple[int, float, float]:
        targets = pair.targets([comparison])
        mass = torch.logaddexp(targets.events[0].logsumexp(dim=0), targets.rests[0]).exp().item()
        places, _, _, ids, _ = ids_read(targets, targets.named).T
        ids = ids[places == 0].tolist()
        return int(targets.events[0].isfinite().sum()), mass, sum(i in ids for i in (97, 98))

    named, mass, letters = first_events(Pair(*sides))
    monkeypatch.setattr(shared_units, "MOST_IDS", 3)
    fewer, same_mass, one_letter = first_events(Pair(*sides))
    assert fewer == named - 1
    assert letters - one_letter == 1
    assert mass == pytest.approx(1)
    assert same_mass == pytest.approx(1)


@every
def test_at_another_temperature_both_sides_are_read_at_it_and_gradients_keep_their_size(
    divergence: str,
) -> None:
    comparison = of_texts(["ab", "57", "3", END], ["a", "b5", "73", END])
    logits = random_logits(PAIR, 4).detach()
    targets = PAIR.targets([comparison])
    config = PrefixKlConfig.model_validate({"divergence": divergence})
    warm = prefix_kl(DenseRows(logits, PAIR.real_ids), targets, config, temperature=2.0)
    cooled = prefix_kl(DenseRows(logits / 2, PAIR.real_ids), targets, config)
    torch.testing.assert_close(warm.per_token, 4 * cooled.per_token)


def test_what_could_only_be_said_after_ending_a_token_is_not_named() -> None:
    # The student writes 570 as one token and 57 as two: after 5 it says 70 in this row, but any
    # other number with 7 only in a row that nobody computed. So 7 has no mass that can be known.
    side = made_of("570", end="<over>")
    encoder = LongestMatch(side.table)
    del encoder.ids[b"57"]
    student, teacher = Tongue(side, encoder), Tongue.of(end="<stop>")
    pair = Pair(student, teacher)
    ids = student.ids(["570", END]), teacher.ids(["5", "7", "0", END])
    targets = pair.targets([completion(pair, *ids, k=teacher.end + 1)])
    # After 5 nothing can be named; after 57 what comes is 0.
    assert targets.positions.tolist() == [0, 0, 1]
    places, _, positions, read, _ = ids_read(targets, targets.named).T
    assert read[places == 1].tolist() == student.ids(["570"])
    assert positions[places == 1].tolist() == [0]
