"""The end of a turn is one event in every loss, for all tokens that end a completion."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_losses import config
from mopd_losses.build import build_loss
from mopd_losses.config import LossConfig
from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head, dense_head
from mopd_losses.core.loss import Loss
from mopd_losses.ends.end_event import EndEvent
from mopd_losses.ends.one_end_loss import OneEndLoss
from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.ends.problems import (
    EQUAL,
    FIRST,
    SECOND,
    THIRD,
    Ends,
    pair_of,
    random_logits,
    rows_of,
    teacher_rows,
    text_ids,
)
from tests.reference.ends import in_ids_of_student, pooled

SAME_IDS: dict[str, LossConfig] = {
    "topk_kl": config.TopKKlConfig(),
    "topk_kl reverse": config.TopKKlConfig(divergence="reverse_kl"),
    "topk_kl renormalised": config.TopKKlConfig(form="renormalised"),
    "topk_kl generalised": config.TopKKlConfig(form="generalised"),
    "policy_gradient": config.PolicyGradientConfig(),
    "policy_gradient baseline": config.PolicyGradientConfig(baseline="top_k"),
    "k2": config.K2Config(),
    "k3": config.K3Config(),
    "alm": config.AlmConfig(),
}
PROJECTED: dict[str, LossConfig] = {
    "ctkd": config.CtkdConfig(),
    "ctkd pooled": config.CtkdConfig(span_rows="pooled"),
    "gold": config.GoldConfig(),
    "simct": config.SimctConfig(),
    "uld": config.UldConfig(),
}
#: Losses that are above zero between equal models with one token, too.
INEXACT: dict[str, LossConfig] = {
    "prefix_kl": config.PrefixKlConfig(),
}
#: L1 distances have a corner at equality.
_CORNER = ("gold", "uld")

every_case = pytest.mark.parametrize("case", EQUAL)


def outcome(loss: Loss, logits: Tensor, pair: Any) -> tuple[float, Tensor]:
    """Return the mean absolute loss per token, in nats, and the gradient of the sum."""
    leaf = logits.clone().requires_grad_()
    output = loss(rows_of(leaf), loss.targets([pair], [0]))
    (gradient,) = torch.autograd.grad(output.per_token.sum(), leaf)
    return float(output.per_token.detach().abs().mean()), gradient


def built(settings: LossConfig, ends: Ends) -> Loss:
    return build_loss(settings, ends.student, ends.teacher)


def test_every_loss_is_in_a_table() -> None:
    union, _ = get_args(LossConfig)
    known = {settings.type for settings in (SAME_IDS | PROJECTED | INEXACT).values()}
    assert known == {member.model_fields["type"].default for member in get_args(union)} - {"auto"}


@every_case
@pytest.mark.parametrize("name", [*SAME_IDS, *PROJECTED])
def test_equal_models_with_other_ends_have_no_loss(case: str, name: str) -> None:
    ends = EQUAL[case]
    ordinary = () if SECOND in ends.own else (SECOND,)
    logits = random_logits(len(text_ids(ordinary)) + 1, seed=3)
    teacher = teacher_rows(logits, ends.renamed)
    pair = pair_of(ends, logits, teacher, k=16, ordinary=ordinary)
    nats, gradient = outcome(built((SAME_IDS | PROJECTED)[name], ends), logits, pair)
    assert nats < (1e-4 if name == "uld" else 1e-5)
    assert name in _CORNER or gradient.abs().max() < 1e-5


@pytest.mark.parametrize("case", ["other tokens", "two other tokens"])
@pytest.mark.parametrize("name", INEXACT)
def test_other_ends_add_nothing_to_a_loss_between_equal_models(case: str, name: str) -> None:
    logits = random_logits(len(text_ids()) + 1, seed=3)
    nats = []
    for ends in (EQUAL["one token"], EQUAL[case]):
        teacher = teacher_rows(logits, ends.renamed)
        pair = pair_of(ends, logits, teacher, k=420)
        nats.append(outcome(built(INEXACT[name], ends), logits, pair)[0])
    assert nats[1] == pytest.approx(nats[0], abs=1e-3)


@every_case
@pytest.mark.parametrize("name", ["topk_kl", "topk_kl reverse", "policy_gradient baseline", "k3"])
def test_value_and_gradient_are_those_of_pooled_distributions(case: str, name: str) -> None:
    ends = EQUAL[case]
    logits = random_logits(len(text_ids()) + 1, seed=4)
    others = random_logits(len(logits), seed=5)
    pair = pair_of(ends, logits, others, k=420)
    nats, gradient = outcome(built(SAME_IDS[name], ends), logits, pair)

    single = EQUAL["one token"]
    leaf = logits.clone().requires_grad_()
    student = one_end(leaf, ends.own)
    teacher = [in_ids_of_student(p, ends.own, ends.others) for p in others.softmax(1).tolist()]
    teacher_ids = torch.tensor(teacher, dtype=torch.float64).log()
    # With the end of ``single``, which is the first id of each of these students.
    expected_pair = pair_of(single, student.detach(), teacher_ids, k=sum(p > 0 for p in teacher[0]))
    if name.startswith("policy"):  # the ratio of the token that was sampled is one
        expected_pair = replace(expected_pair, sampled_logprobs=_sampled(student, ends))
    loss = built(SAME_IDS[name], single)
    output = loss(rows_of(student), loss.targets([expected_pair], [0]))
    (expected,) = torch.autograd.grad(output.per_token.sum(), leaf)
    assert nats == pytest.approx(float(output.per_token.detach().abs().mean()), abs=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-5)


def one_end(logits: Tensor, ends: Sequence[int]) -> Tensor:
    """Logits whose ids that end are one: the logarithm of the sum, and nothing for the others."""
    rows = logits.log_softmax(dim=1)
    assert pooled(rows[0].exp().tolist(), ends)[ends[0]] == pytest.approx(
        float(rows.detach()[0, list(ends)].logsumexp(0).exp())
    )
    at = torch.tensor(ends)
    rows = rows.index_fill(1, at, -torch.inf)
    return rows.index_copy(1, at[:1], logits.log_softmax(dim=1)[:, at].logsumexp(1, keepdim=True))


def _sampled(student: Tensor, ends: Ends) -> np.ndarray[Any, Any]:
    ids = torch.tensor([*text_ids(), ends.own[0]])
    return student.detach().gather(1, ids[:, None])[:, 0].numpy().astype(np.float32)


def test_an_ordinary_token_that_ends_for_the_teacher_is_not_taught() -> None:
    ends = EQUAL["other tokens"]
    logits = torch.full((len(text_ids()) + 1, ends.student.table.size), -9.0, dtype=torch.float64)
    logits[torch.arange(len(logits) - 1), torch.tensor(text_ids())] = 9.0
    logits[-1, SECOND] = 9.0  # ends completions of the teacher only
    pair = pair_of(ends, logits, logits.clone(), k=16)
    for name in ("topk_kl", "topk_kl reverse", "k2", "policy_gradient", "alm", "ctkd", "simct"):
        _, gradient = outcome(built((SAME_IDS | PROJECTED)[name], ends), logits, pair)
        assert gradient[-1, SECOND] >= 0, name
        assert gradient[-1, FIRST] < 0 or name == "alm", name
    nats, _ = outcome(built(config.TopKKlConfig(), ends), logits, pair)
    assert nats * len(logits) > 1


def test_a_sampled_token_that_ends_for_the_teacher_only_has_no_likelihood() -> None:
    ends = Ends((FIRST,), (FIRST, SECOND), {})
    ordinary = (SECOND,)
    logits = random_logits(len(text_ids(ordinary)) + 1, seed=3)
    pair = pair_of(ends, logits, logits, k=16, ordinary=ordinary)
    event = EndEvent.between(ends.student.table, ends.teacher.table, one_vocabulary=True)
    assert event is not None
    renamed, _ = event.of(pair)
    assert np.flatnonzero(np.isneginf(renamed.score.logprobs)).tolist() == [3]
    assert renamed.score.token_ids[3] == SECOND
    assert (renamed.score.token_ids[-1], renamed.student.token_ids[-1]) == (FIRST, FIRST)


@every_case
@pytest.mark.parametrize("name", ["topk_kl", "k3", "simct"])
def test_the_blockwise_head_gives_the_same(case: str, name: str) -> None:
    ends = EQUAL[case]
    logits = random_logits(len(text_ids()) + 1, seed=4)
    teacher = random_logits(len(logits), seed=5)
    loss = built((SAME_IDS | PROJECTED)[name], ends)
    targets = loss.targets([pair_of(ends, logits, teacher, k=12)], [0])
    term = LossTerm(loss, targets, torch.ones(len(logits), dtype=torch.float64))
    real = torch.ones(logits.shape[1], dtype=torch.bool)
    results = []
    for head in ("dense", "blocks"):
        leaf = logits.clone().requires_grad_()
        if head == "dense":
            total, _ = dense_head(leaf, real, [term])
        else:
            identity = torch.eye(logits.shape[1], dtype=torch.float64)
            total, _ = blockwise_head(leaf, Head(identity, real), [term], rows_per_block=3)
        results.append((float(total.detach()), torch.autograd.grad(total, leaf)[0]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-9)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-9)


@every_case
def test_full_rows_have_one_end(case: str) -> None:
    ends = EQUAL[case]
    logits = random_logits(len(text_ids()) + 1, seed=3)
    pair = pair_of(ends, logits, teacher_rows(logits, ends.renamed), k=16)
    identity = torch.eye(logits.shape[1], dtype=torch.float64)
    head = Head(identity, torch.ones(logits.shape[1], dtype=torch.bool))
    event = EndEvent.between(ends.student.table, ends.teacher.table, one_vocabulary=True)
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        settings = config.TopKKlConfig(divergence=divergence)
        nats, gradient = outcome(FullVocabularyLoss(head, settings, ends=event), logits, pair)
        assert nats < 1e-9
        assert gradient.abs().max() < 1e-9
    ordinary = Ends((FIRST,), (FIRST, SECOND), {})
    event = EndEvent.between(ordinary.student.table, ordinary.teacher.table, one_vocabulary=True)
    settings = config.TopKKlConfig(divergence="reverse_kl")
    nats, _ = outcome(FullVocabularyLoss(head, settings, ends=event), logits, pair)
    assert 1e-3 < nats < math.inf


def test_one_equal_end_costs_nothing() -> None:
    tables = EQUAL["one token"].student.table, EQUAL["one token"].teacher.table
    assert EndEvent.between(*tables, one_vocabulary=True) is None
    assert EndEvent.between(*tables, one_vocabulary=False) is None
    without = replace(tables[1], roles=tables[1].roles.model_copy(update=_NONE))
    assert EndEvent.between(tables[0], without, one_vocabulary=True) is None
    for settings in (config.TopKKlConfig(), config.K2Config(), config.CtkdConfig()):
        assert not isinstance(built(settings, EQUAL["one token"]), OneEndLoss)


_NONE = {"eos": None, "end_of_turn": None}


@pytest.mark.parametrize(
    ("ids", "token", "expected"),
    [
        # Both ends are entries, and the completion's own is one of them.
        ([FIRST, 9, SECOND, 8], SECOND, {FIRST: 0.6, 9: 0.2, 8: 0.1}),
        # The completion's own end is in the tail.
        ([FIRST, 9, 7, 8], SECOND, {FIRST: 0.55, 9: 0.2, 7: 0.1, 8: 0.1}),
        ([9, 8, 7, 6], SECOND, {9: 0.5, 8: 0.2, 7: 0.1, 6: 0.1}),
    ],
)
def test_a_renamed_row_has_the_mass_of_all_ends_once(
    ids: list[int], token: int, expected: dict[int, float]
) -> None:
    masses = np.array([0.5, 0.2, 0.1, 0.1])
    own = masses[ids.index(token)] if token in ids else 0.05
    ends = EQUAL["the same two"]
    event = EndEvent.between(ends.student.table, ends.teacher.table, one_vocabulary=True)
    assert event is not None
    logits = random_logits(len(text_ids()) + 1, seed=3)
    pair = pair_of(ends, logits, logits, k=4)
    topk = TopKLogprobs(np.array([ids]), np.log(masses)[None], np.log([own]), np.log([0.1]))
    end = TokenSequence(np.array([token]), np.zeros(1), b"", {0: "end_of_turn"})  # type: ignore[arg-type]
    spans = replace(
        pair.alignment,
        **{
            name: getattr(pair.alignment, name)[:1]
            for name in ("student_starts", "student_ends", "teacher_starts", "teacher_ends")
        },
    )
    score = replace(pair.score, completion=end, topk=topk, hidden=torch.zeros(1, 1))
    renamed, known = event.of(replace(pair, student=end, score=score, alignment=spans))
    row = renamed.score.topk
    kept = row.ids[0] >= 0
    nats = row.logprobs[0][kept].tolist()
    masses_by_id = dict(zip(row.ids[0][kept].tolist(), map(math.exp, nats), strict=True))
    assert masses_by_id == pytest.approx(expected, rel=1e-5)
    total = sum(masses_by_id.values()) + math.exp(row.tail_logprobs[0])
    assert total == pytest.approx(1, rel=1e-5)
    in_entries = FIRST in masses_by_id
    assert math.exp(row.token_logprobs[0]) == pytest.approx(
        masses_by_id[FIRST] if in_entries else 0.05, rel=1e-5
    )
    # An end that is not among the entries is no likelier than the last one.
    assert math.exp(known.most[0]) == pytest.approx(0.0 if in_entries else 0.1, rel=1e-5)


def test_what_the_tail_may_have_of_the_end_is_not_compared() -> None:
    """A student that is its own teacher: its other end is in the tail of the top-k."""
    ends = EQUAL["the same two"]
    logits = random_logits(len(text_ids()) + 1, seed=3)
    logits[:, SECOND] -= 6
    logits[:, FIRST] += 4
    pair = pair_of(replace(ends, own=(FIRST, SECOND)), logits, logits, k=4)
    nats, _ = outcome(built(config.TopKKlConfig(), ends), logits, pair)
    assert nats < 1e-6
    # A student whose other end is likelier than any token in the tail.
    other = logits.clone()
    other[:, SECOND] += 12
    nats, _ = outcome(built(config.TopKKlConfig(), ends), other, pair)
    assert nats > 0.01


def test_a_sampled_end_has_the_ratio_of_its_token() -> None:
    ends = EQUAL["the same two"]
    logits = random_logits(len(text_ids()) + 1, seed=3)
    pair = pair_of(ends, logits, logits, k=16)
    loss = built(config.PolicyGradientConfig(), ends)
    output = loss(rows_of(logits), loss.targets([pair], [0]))
    assert output.measured["importance_ratio"].tolist() == pytest.approx([1.0] * len(logits))


def test_targets_are_of_the_id_that_a_third_token_does_not_share() -> None:
    """Control tokens that end nothing keep their ids."""
    ends = EQUAL["other tokens"]
    logits = random_logits(len(text_ids((THIRD,))) + 1, seed=3)
    pair = pair_of(ends, logits, teacher_rows(logits, ends.renamed), k=16, ordinary=(THIRD,))
    event = EndEvent.between(ends.student.table, ends.teacher.table, one_vocabulary=True)
    assert event is not None
    renamed, _ = event.of(pair)
    assert renamed.score.token_ids[3] == THIRD
