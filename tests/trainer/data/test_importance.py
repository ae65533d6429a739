"""Importance weights of sampled tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import align
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenRoles, TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.settings import UNWEIGHTED, ImportanceConfig
from mopd_trainer.data.importance import ImportanceWeights
from mopd_trainer.data.text_masses import text_masses
from tests.reference.importance import importance_weights as reference
from tests.reference.importance import text_mass
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout, table

#: A token in nats.
_NATS = st.floats(-8, -0.0078125, width=32)

_EXAMPLE = example(rollout("digit", ids_of("digit", "7"), teachers={"math": 1.0}))

#: The teacher's probability of its likeliest token, of other text than all others; these have the
#: rest.
_LIKELIEST = 0.75
_OTHER = 30

Side = tuple[list[int], list[float]]


@st.composite
def _sides(draw: st.DrawFn) -> tuple[Side, Side]:
    """Draw two tokenizations of one text: where their tokens end, and the log-probabilities."""
    size = draw(st.integers(1, 24))
    sides: list[Side] = []
    for _ in range(2):
        inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        ends = [*sorted(inner), size]
        nats = draw(st.lists(_NATS, min_size=len(ends), max_size=len(ends)))
        sides.append((ends, nats))
    return sides[0], sides[1]


def weights_of(
    student: Side, teacher: Side, config: ImportanceConfig, temperature: float = 1
) -> list[float]:
    text = bytes(range(student[0][-1]))
    own, other = (TokenSequence(range(len(s[0])), s[0], text) for s in (student, teacher))
    [score] = _EXAMPLE.scores
    sampled = replace(
        _EXAMPLE.rollout,
        completion=own,
        sampled_logprobs=np.array(student[1]),
        finish_reason="length",
    )
    rows = len(other)
    topk = TopKLogprobs(
        ids=np.full((rows, 1), _OTHER),
        logprobs=np.log(np.full((rows, 1), _LIKELIEST)),
        token_logprobs=np.array(teacher[1]),
        tail_logprobs=np.log(np.full(rows, 1 - _LIKELIEST)),
    )
    scored = replace(score, score=TeacherScore("m" * 32, other, topk), alignment=align(own, other))
    weights = ImportanceWeights(config, temperature, {"math": _table([b""] * _OTHER + [b"\xff"])})
    return weights.of(sampled, scored).tolist()


def _table(pieces: Sequence[bytes]) -> TokenTable:
    """Return the table of a tokenizer with these tokens."""
    return TokenTable(
        fingerprint="test",
        roles=TokenRoles(),
        offsets=np.cumsum([0, *map(len, pieces)]),
        data=np.frombuffer(b"".join(pieces), dtype=np.uint8),
        present=np.ones(len(pieces), dtype=np.bool_),
        marks={},
        controls={},
        exact_text=True,
    )


@given(sides=_sides(), least=st.floats(0.001, 1), discount=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_weights_are_the_discounted_ratios_of_the_text_before_each_token(
    sides: tuple[Side, Side], least: float, discount: float
) -> None:
    config = ImportanceConfig(least=least, discount=discount)
    expected = reference(*sides[0], *sides[1], least=least, discount=discount)
    assert weights_of(*sides, config) == pytest.approx(expected, rel=1e-5)


@given(ends=st.sets(st.integers(1, 30), min_size=1), nats=_NATS)
def test_every_weight_is_one_if_both_sides_have_the_same_distribution(
    ends: set[int], nats: float
) -> None:
    side = sorted(ends), [nats] * len(ends)
    assert weights_of(side, side, ImportanceConfig(least=0.1)) == [1.0] * len(ends)


@given(sides=_sides(), temperature=st.sampled_from([0.5, 0.6, 2.0]))
def test_the_teacher_is_compared_at_the_temperature_of_the_sample(
    sides: tuple[Side, Side], temperature: float
) -> None:
    config = ImportanceConfig(least=0.01)
    likely, rest = _LIKELIEST ** (1 / temperature), (1 - _LIKELIEST) ** (1 / temperature)
    ends, nats = sides[1]
    tempered = ends, [each / temperature - math.log(likely + rest) for each in nats]
    expected = reference(*sides[0], *tempered, least=0.01, discount=config.discount)
    assert weights_of(*sides, config, temperature) == pytest.approx(expected, rel=1e-4)


def test_greedy_samples_are_compared_with_the_teachers_probabilities() -> None:
    side = [1, 2], [0.0, 0.0]
    assert weights_of(side, ([1, 2], [-1.0, 0.0]), ImportanceConfig(), 0) == pytest.approx(
        [1, math.exp(-1)]
    )


def _sums(nats: Sequence[float], least: float, discount: float) -> list[float]:
    """Return the weights of tokens of a byte that the student samples with certainty."""
    ends = list(range(1, len(nats) + 1))
    config = ImportanceConfig(least=least, discount=discount)
    return weights_of((ends, [0.0] * len(ends)), (ends, list(nats)), config)


def test_the_first_wrong_token_has_the_full_weight_and_those_behind_it_the_least() -> None:
    assert _sums([0, 0, -5, 0, 0], 0.1, 1.0) == pytest.approx([1, 1, 1, 0.1, 0.1])
    forgotten = _sums([0, 0, -5, *[0] * 40], 0.1, 0.9)
    assert forgotten[3] == pytest.approx(0.1)
    assert forgotten == pytest.approx(
        [1, 1, 1, *(max(0.1, np.exp(-5 * 0.9**n)) for n in range(40))]
    )
    assert forgotten[-1] > 0.9


def test_text_that_the_teacher_excludes_has_the_least_weight() -> None:
    assert _sums([0, -np.inf, 0, 0], 0.2, 1.0) == pytest.approx([1, 1, 0.2, 0.2])


def test_reference_completions_and_a_least_weight_of_one_have_no_weights() -> None:
    written = rollout("digit", ids_of("digit", "12 + 30 = 42"), teachers={"code": 1.0})
    written = replace(written, sampled_logprobs=np.zeros(len(written.completion)))
    [score] = example(written).scores
    tables, ones = {"code": table("whole_number")}, [1.0] * len(written.completion)
    strict = ImportanceWeights(ImportanceConfig(least=0.01), 1, tables)
    assert strict.of(written, score).min() < 1
    assert ImportanceWeights(UNWEIGHTED, 1, tables).of(written, score).tolist() == ones
    assert strict.of(replace(written, sampled_logprobs=None), score).tolist() == ones


#: All texts of one to three letters.
_PIECES = [bytes(each) for size in (1, 2, 3) for each in product(b"ab", repeat=size)]


@given(data=st.data(), temperature=st.sampled_from([0.5, 1.0]))
def test_the_mass_of_a_text_is_that_of_all_tokens_which_begin_with_it(
    data: st.DataObject, temperature: float
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6))
    ids = [_PIECES.index(piece) for piece in pieces]
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    shares = draw.dirichlet(np.full(len(_PIECES), 0.3), size=len(pieces)) + 1e-3
    shares /= shares.sum(axis=1, keepdims=True)
    # The top-k may omit tokens, which then count only where they are written.
    k = data.draw(st.sampled_from([len(_PIECES), 4]))
    order = np.argsort(-shares, axis=1)[:, :k]
    kept = np.take_along_axis(shares, order, axis=1)
    with np.errstate(divide="ignore"):
        topk = TopKLogprobs(
            ids=order,
            logprobs=np.log(kept),
            token_logprobs=np.log(shares[np.arange(len(ids)), ids]),
            tail_logprobs=np.log(np.clip(1 - kept.sum(axis=1), 0, None)),
        )
    table = _table(_PIECES)
    score = TeacherScore("m" * 32, table.sequence(ids), topk)
    ends = np.array(sorted(data.draw(st.sets(st.integers(1, len(ids)), min_size=1))))
    _, actual = text_masses(score, table, ends, temperature)
    rows = [
        {_PIECES[token]: share for token, share in zip(*row, strict=True)}
        for row in zip(order.tolist(), kept.tolist(), strict=True)
    ]
    if k == len(_PIECES):
        expected = [text_mass(pieces, rows, int(end), 1 / temperature, 1e-3) for end in ends]
        assert np.exp(actual) == pytest.approx(np.minimum(expected, 1), rel=1e-4)
    else:
        written, _ = text_masses(score, table, ends, temperature)
        assert (actual >= np.minimum(written[ends], 0) - 1e-9).all()


def test_a_token_that_the_teacher_would_continue_does_not_reduce_the_weight_behind_it() -> None:
    """The teacher writes `` 20`` as one token, the student a space first; `` 22`` is wrong."""
    pieces = [b"June", b" ", b" 20", b"20", b"22"]
    table = _table(pieces)
    for own, weights in (([0, 1, 3, 3], [1, 1, 1, 1]), ([0, 1, 4, 4], [1, 1, 1, 0.1])):
        completion = table.sequence(own)
        likely = [[0, 1], [2, 1], [4, 3], [4, 3]][: len(own)]
        nats = np.log([[0.998, 0.001]] * len(own))
        topk = TopKLogprobs(
            ids=np.array(likely),
            logprobs=nats,
            token_logprobs=np.array(
                [nats[row][choice.index(own[row])] for row, choice in enumerate(likely)]
            ),
            tail_logprobs=np.log(np.full(len(own), 0.001)),
        )
        [score] = _EXAMPLE.scores
        scored = replace(
            score,
            score=TeacherScore("m" * 32, completion, topk),
            alignment=align(completion, completion),
        )
        sampled = replace(
            _EXAMPLE.rollout,
            completion=completion,
            sampled_logprobs=np.log(np.full(len(own), 0.998)),
            finish_reason="length",
        )
        actual = ImportanceWeights(ImportanceConfig(least=0.1), 1, {"math": table})
        assert actual.of(sampled, scored) == pytest.approx(weights, abs=1e-2)
