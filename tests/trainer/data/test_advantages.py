"""Advantages equal their twin; what no term trains is dropped and counted."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.errors import DataError
from mopd_trainer.config.rewards import ReinforcementConfig, RewardConfig
from mopd_trainer.config.settings import LossAverage
from mopd_trainer.data.advantages import with_advantages
from mopd_trainer.data.averaging import sample_weights
from mopd_trainer.data.examples import TrainingExample
from tests.reference.rewards import advantages
from tests.trainer.rewarded_examples import rewarded

REWARDS = st.sampled_from([0.0, 0.1, 0.7, 1.0])
GROUPS = st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=5), max_size=4)


@given(groups=GROUPS, weights=st.tuples(*[st.sampled_from([0.5, 1, 3])] * 2), normalize=...)
def test_advantages_equal_the_twin(
    groups: list[list[tuple[float, float]]], weights: tuple[float, float], normalize: bool
) -> None:
    members = [(index, values) for index, group in enumerate(groups) for values in group]
    order = np.random.default_rng(len(members)).permutation(len(members)).tolist()
    examples = [
        rewarded(index=members[at][0], first=members[at][1][0], second=members[at][1][1])
        for at in order
    ]
    rewards = {
        "first": RewardConfig(weight=weights[0]),
        "second": RewardConfig(weight=weights[1]),
        "logged": RewardConfig(weight=0),
    }
    for each in examples:  # a reward without a weight changes nothing
        assert "logged" in each.rollout.rewards
    config = ReinforcementConfig(normalize=normalize)
    kept, metrics = with_advantages(examples, rewards, config)
    expected = [a for group in advantages(groups, weights, normalize=normalize) for a in group]
    computed = [each.advantage for each in kept if each.advantage is not None]
    np.testing.assert_allclose(computed, [expected[at] for at in order], atol=1e-9)
    spread = {index: len({*group}) > 1 for index, group in enumerate(groups) if group}
    if spread:
        assert metrics["reinforcement/spread_share"] == np.mean([*spread.values()])
        mean = np.mean([values[0] for group in groups for values in group])
        assert metrics["reward/first"] == pytest.approx(mean)
    for each in kept:  # the mean of equal values may be rounded; no gradient may come of it
        if not spread[
            [g for g, group in enumerate(groups) if group].index(each.rollout.prompt.index)
        ]:
            assert each.advantage == 0


def test_groups_without_spread_are_filtered() -> None:
    examples = [
        rewarded(index=0, first=0.0),
        rewarded(index=0, first=1.0),
        rewarded(index=1, first=1.0),
        rewarded(index=1, first=1.0, teachers={"math": 1.0}),
    ]
    config = ReinforcementConfig(filter_groups=True)
    kept, metrics = with_advantages(examples, {"first": RewardConfig()}, config)
    assert [each.rollout.prompt.index for each in kept] == [0, 0, 1]
    assert [each.advantage is None for each in kept] == [False, False, True]
    assert metrics["dropped/no_spread"] == metrics["dropped/total"] == 1
    weights = sample_weights(kept, "tokens")
    assert [each.reward > 0 for each in weights] == [True, True, False]
    assert [bool(each.teachers) for each in weights] == [False, False, True]


def test_completions_that_nothing_trains_are_dropped() -> None:
    examples = [rewarded(index=0, first=1.0), rewarded(index=0, first=0.0, teachers={"math": 1.0})]
    gate = {"first": RewardConfig(weight=0, distill="failed")}
    kept, metrics = with_advantages(examples, gate, ReinforcementConfig())
    assert [each.rollout.rewards["first"] for each in kept] == [0.0]
    assert metrics["dropped/not_distilled"] == 1
    assert metrics["reward/first"] == 0.5


@pytest.mark.parametrize("average", get_args(LossAverage))
def test_excluded_completions_count_with_a_loss_of_zero(average: LossAverage) -> None:
    examples = [
        rewarded(index=0, text="12345", first=1.0, teachers={"math": 1.0, "code": 2.0}),
        rewarded(index=0, text="1", first=0.0),
        rewarded(index=1, text="123", first=0.0, teachers={"code": 1.0}),
    ]
    kept, _ = with_advantages(examples, {"first": RewardConfig()}, ReinforcementConfig())
    lengths = [len(each.rollout.completion) for each in kept]
    weights = sample_weights(kept, average)
    tokens = sum(lengths)
    shares = [sum(each.teachers.values()) for each in weights]
    distilled = 2 / 3 if average == "samples" else (lengths[0] + lengths[2]) / tokens
    taught = sum(s * n for s, n in zip(shares, lengths, strict=True)) / tokens
    assert taught == pytest.approx(distilled)
    included = sample_weights([kept[0], kept[2]], average)
    taught = sum(sum(w.teachers.values()) * n for w, n in zip(included, lengths[::2], strict=True))
    assert taught / sum(lengths[::2]) == pytest.approx(1)
    rewards = [each.reward * n for each, n in zip(weights, lengths, strict=True)]
    assert sum(rewards) / tokens == pytest.approx(1)
    assert shares[1] == 0
    if average == "samples":
        assert rewards[0] == pytest.approx(rewards[1])


def test_a_rollout_without_score_or_reward_is_invalid() -> None:
    unrewarded = rewarded(index=3, first=1.0).rollout
    with pytest.raises(DataError, match="prompt 3"):
        TrainingExample(replace(unrewarded, rewards={}), ())
