"""Prefix KL on models that are known to the last text: one byte model through two tokenizers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import CtkdConfig
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.projection.matrix import identity_projection
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import topk_targets
from mopd_protocol.samples import TeacherScore
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.families import NAMES, family
from tests.losses.prefix_pairs import (
    END_CHARACTER,
    Pair,
    Tongue,
    compared,
    model_rows,
    random_pair,
)
from tests.reference import prefix_kl as slow
from tests.reference.text_model import END, TokenModel, markov_texts

LETTERS = "ab"
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
every = pytest.mark.parametrize("divergence", DIVERGENCES)

#: Both directions of long against short, partly overlapping, long against long.
PAIRS = {
    "same": Pair(Tongue.of("ab", "aa"), Tongue.of("ab", "aa", end="<stop>")),
    "long student": Pair(Tongue.of("aa", "aaa", "ab", "aba"), Tongue.of(end="<stop>")),
    "long teacher": Pair(Tongue.of(), Tongue.of("aa", "aaa", "ab", "aba", end="<stop>")),
    "overlapping": Pair(Tongue.of("ab", "abb", "ba"), Tongue.of("bb", "bba", "aa", end="<stop>")),
    "nested": Pair(Tongue.of("aa", "aaa", "ab"), Tongue.of("aa", "ba", "bab", end="<stop>")),
    **{f"random {seed}": random_pair(seed) for seed in (2, 3, 5, 8)},
}
#: Not by longest match: ``aaaa`` is written ``aa aa`` though ``aaa`` is a token.
BY_MERGES = Pair(
    Tongue.of("aa", "aaa", "aaaa", "ba", by_merges=True),
    Tongue.of("ab", end="<stop>", by_merges=True),
)
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def models(pair: Pair, longest: int = 5, seed: int = 0) -> tuple[TokenModel, TokenModel]:
    texts = markov_texts(LETTERS, longest, seed)
    return TokenModel(texts, pair.student.tokenize), TokenModel(texts, pair.teacher.tokenize)


def scored(
    pair: Pair, text: str, token_models: tuple[TokenModel, TokenModel], k: int = 8
) -> tuple[Tensor, AlignedPair]:
    """The student's exact log-probabilities on its own writing of ``text``, and the teacher's."""
    student, teacher = token_models
    written = pair.student.ids(student.written[text])
    read = pair.teacher.ids(teacher.written[text])
    rows = model_rows(pair.teacher, teacher, text)
    return model_rows(pair.student, student, text), compared(pair, written, read, rows, k)


def sides(
    pair: Pair, text: str, token_models: tuple[TokenModel, TokenModel]
) -> tuple[slow.Side, slow.Side]:
    """The same for the slow reference, of everything that either model says."""
    found: list[slow.Side] = []
    for tongue, model in zip((pair.student, pair.teacher), token_models, strict=True):
        rows = model_rows(tongue, model, text)
        kept = [torch.nonzero(~row.isneginf()).flatten().tolist() for row in rows]
        written = tongue.ids(model.written[text])
        found.append(tongue.side(written, rows, [0.0] * len(written), kept))
    return found[0], found[1]


@every
@pairs
def test_one_byte_model_through_two_tokenizers_is_no_distance_from_itself(
    pair: Pair, divergence: str
) -> None:
    token_models = models(pair)
    for text in token_models[0].texts:
        logprobs, comparison = scored(pair, text, token_models)
        # A student that rules nothing out wholly: what it does not say has e^-60.
        logits = logprobs.clamp_min(-60).requires_grad_()
        targets = pair.targets([comparison])
        found = pair.value(logits, targets, divergence=divergence).per_token
        found.sum().backward()
        assert logits.grad is not None
        # The student's rest is held above 1e-6 where the teacher has none.
        tolerance = 1e-12 if divergence == "forward_kl" else 1e-5
        assert found.abs().max() < tolerance, text
        assert logits.grad.abs().max() < tolerance, text


@pytest.mark.parametrize("pair", [PAIRS["long student"], PAIRS["long teacher"]])
def test_another_byte_model_is_at_a_distance(pair: Pair) -> None:
    student, _ = models(pair, seed=0)
    _, teacher = models(pair, seed=1)
    for text in ("aab", "abab", "aaaa"):
        logprobs, comparison = scored(pair, text, (student, teacher))
        found = pair.value(logprobs.clamp_min(-60), pair.targets([comparison])).per_token
        assert found.sum() > 0.1


def going_on(model: TokenModel, others: TokenModel, text: str, at: int) -> list[str]:
    """All texts with this beginning and a boundary there on either side."""
    return [
        other
        for other in model.texts
        if len(other) >= at
        and other[:at] == text[:at]
        and at in model.boundaries(other) | others.boundaries(other)
    ]


def event(text: str, at: int, student: slow.Side, teacher: slow.Side) -> str | None:
    """The longest unit that a text goes on with, or where that is counted."""
    after = text[at:] + END_CHARACTER
    unit = max((u for u in slow.shared(student, teacher) if after.startswith(u)), key=len)
    return slow.cell_of(unit, student, teacher, at)


@pytest.mark.parametrize("pair", [*PAIRS.values(), BY_MERGES], ids=[*PAIRS, "by merges"])
def test_both_sides_equal_brute_force_over_all_texts_but_for_what_is_neglected(pair: Pair) -> None:
    token_models = models(pair, longest=5)
    worst = 0.0
    for text in ("", "ab", "aab", "abab", "bbaa", "aaaa", "aabaa"):
        student, teacher = sides(pair, text, token_models)
        for place in slow.places(student, teacher):
            texts = going_on(*token_models, text, place.at)
            masses = {other: token_models[0].texts[other] for other in texts}
            truth: dict[str | None, float] = dict.fromkeys(place.teacher, 0.0)
            for other, mass in masses.items():
                cell = event(other, place.at, student, teacher)
                truth[cell] = truth.get(cell, 0.0) + mass / math.fsum(masses.values())
            for side, other_side, model, told in (
                (student, teacher, token_models[0], place.student),
                (teacher, student, token_models[1], place.teacher),
            ):
                neglected = slow.neglected_mass(
                    side,
                    other_side,
                    student,
                    teacher,
                    place.at,
                    [
                        (mass, [END_CHARACTER if t == END else t for t in model.written[other]])
                        for other, mass in masses.items()
                    ],
                    lambda t, at=place.at, s=student, o=teacher: event(
                        t.removesuffix(END_CHARACTER), at, s, o
                    ),
                )
                worst = max(worst, neglected)
                off = sum(abs(told[cell] - truth[cell]) for cell in told) / 2
                assert off <= neglected / max(1 - neglected, 1e-9) + 1e-12
    if pair is BY_MERGES:
        assert worst > 0.01
    else:
        assert worst == 0


TRAP = Tongue.of("57")
DIGITS = Tongue.of(end="<stop>")


def one_text(
    student: Tongue,
    teacher: Tongue,
    text: str,
    teacher_rows: list[dict[str, float]],
) -> tuple[Pair, AlignedPair]:
    """Both write ``text`` and end; the teacher's rows by what they say."""
    pair = Pair(student, teacher)
    rows = torch.full(
        (len(teacher_rows), teacher.family.logit_width), -torch.inf, dtype=torch.float64
    )
    for row, said in zip(rows, teacher_rows, strict=True):
        ids = torch.tensor(teacher.ids(list(said)))
        row[ids] = torch.tensor(list(said.values()), dtype=torch.float64).log()
    written = student.ids([*student.tokenize(text), END])
    read = teacher.ids([*teacher.tokenize(text), END])
    return pair, compared(pair, written, read, rows, k=3)


@every
def test_a_student_that_stopped_after_5_is_drawn_to_the_7_of_a_teacher_that_says_57(
    divergence: str,
) -> None:
    # The teacher's own next row, after its 5, says stop; what it thinks of 7 is in the row before.
    pair, comparison = one_text(
        DIGITS, TRAP, "5", [{"57": 0.9, "5": 0.1}, {END: 0.98, "7": 0.01, "5": 0.01}]
    )
    logits = torch.full((2, DIGITS.family.logit_width), -12.0, dtype=torch.float64)
    logits[0, DIGITS.ids(["5"])] = 0.0
    logits[1, DIGITS.ids([END, "7", "5"])] = torch.tensor([3.0, 0, 0], dtype=torch.float64)
    logits.requires_grad_()
    found = pair.value(logits, pair.targets([comparison]), divergence=divergence).per_token
    assert (found > 0).all()
    found.sum().backward()
    assert logits.grad is not None
    seven, end = logits.grad[1, DIGITS.ids(["7", END])].tolist()
    assert seven < -1e-3 < 1e-3 < end
    # At the end of the descent the student says 7 with 0.9 + 0.1 * 0.01 and stops with 0.1 * 0.98.
    told = [0.9 + 0.1 * 0.01, 0.1 * 0.98, 0.1 * 0.01]
    exact = torch.full((2, DIGITS.family.logit_width), -60.0, dtype=torch.float64)
    exact[0, DIGITS.ids(["5"])] = 0.0
    exact[1, DIGITS.ids(["7", END, "5"])] = torch.tensor(told, dtype=torch.float64).log()
    again = exact.requires_grad_()
    pair.value(again, pair.targets([comparison])).per_token.sum().backward()
    assert again.grad is not None
    assert again.grad.abs().max() < 1e-9


@every
def test_a_student_of_long_tokens_that_stopped_after_5_is_drawn_to_57(divergence: str) -> None:
    # The teacher writes digits and would go on with 7; the student's next row only knows "stopped".
    pair, comparison = one_text(TRAP, DIGITS, "5", [{"5": 1.0}, {"7": 0.9, END: 0.1}])
    logits = torch.full((2, TRAP.family.logit_width), -12.0, dtype=torch.float64)
    logits[0, TRAP.ids(["5", "57"])] = torch.tensor([3.0, 0], dtype=torch.float64)
    logits[1, TRAP.ids([END, "7"])] = torch.tensor([3.0, 0], dtype=torch.float64)
    logits.requires_grad_()
    found = pair.value(logits, pair.targets([comparison]), divergence=divergence).per_token
    found[1:].sum().backward()  # what stands after the 5
    assert logits.grad is not None
    longer, shorter = logits.grad[0, TRAP.ids(["57", "5"])].tolist()
    assert longer < -1e-3
    assert shorter > 1e-3


def test_ending_a_long_token_early_is_an_opinion_too() -> None:
    # The teacher wrote 57 but might have stopped at 5; how it would go on is in no row of its own.
    pair, comparison = one_text(DIGITS, TRAP, "57", [{"57": 0.6, "5": 0.3, "8": 0.1}, {END: 1.0}])
    targets = pair.targets([comparison])
    assert targets.positions.tolist() == [0, 1, 2]
    everything = torch.logaddexp(targets.events.logsumexp(dim=1), targets.rests)
    after_5 = (targets.events[1, 0] - everything[1]).exp().item()
    assert after_5 == pytest.approx(0.6 / 0.9)
    assert targets.path_masses[1].item() == pytest.approx(0.9)


@every
def test_with_one_tokenizer_it_is_the_same_vocabulary_form_bit_for_bit(divergence: str) -> None:
    for name in NAMES:
        one = family(name)
        pair = Pair(Tongue(one, one.encoder), Tongue(one, one.encoder))
        ids = [*one.encoder.encode("12 + 30 = 42, naïve"), *one.table.roles.ending[:1]]
        sequence = one.table.sequence(ids)
        torch.manual_seed(0)
        teacher = torch.randn(len(ids), one.logit_width) * 3
        real = torch.tensor(one.table.real_ids(one.logit_width))
        values, kept = teacher.masked_fill(~real, -torch.inf).log_softmax(dim=1).topk(9, dim=1)
        topk = TopKLogprobs(
            ids=kept.numpy(),
            logprobs=values.numpy(),
            token_logprobs=np.full(len(ids), -1.0),
            tail_logprobs=np.log1p(-values.double().exp().sum(dim=1).numpy()),
        )
        comparison = AlignedPair(
            sequence,
            np.zeros(len(ids), dtype=np.float32),
            TeacherScore("teacher", sequence, topk),
            align(sequence, sequence),
        )
        projection = DeviceProjection.copy_of(
            identity_projection(one.table, logit_width=one.logit_width), torch.device("cpu")
        )
        settings = CtkdConfig.model_validate({"divergence": divergence})
        for dtype in (torch.float32, torch.float64):
            logits = torch.randn(len(ids), one.logit_width, dtype=dtype)
            rows = DenseRows(logits, real)
            found = pair.loss(1e-4, divergence=divergence)(rows, pair.targets([comparison]))
            same_vocabulary = TopKDivergenceLoss(projection, settings)
            expected = same_vocabulary(rows, topk_targets(comparison.alignment, topk))
            assert torch.equal(found.per_token, expected.per_token)
            assert torch.equal(found.measured["student_mass"], expected.measured["student_mass"])
            assert (found.measured["path_weight"] == 1).all()
            assert (found.measured["student_path_mass"] == 1).all()
