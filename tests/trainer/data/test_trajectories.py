"""Turns of an agent's trajectory have one reward and one advantage."""

from dataclasses import replace

import numpy as np

from mopd_protocol.samples import Rollout
from mopd_trainer.config.rewards import ReinforcementConfig, RewardConfig
from mopd_trainer.data.advantages import with_advantages
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.trajectories import trajectories
from mopd_trainer.evaluation.rewards import RolloutGrader
from tests.trainer.rewarded_examples import rewarded
from tests.trainer.students import ids_of, rollout


def turns(index: int, sample: int, *texts: str) -> list[Rollout]:
    """Return the turns of a trajectory."""
    sampled = [rollout("digit", ids_of("digit", text, "<|end|>"), index=index) for text in texts]
    return [
        replace(each, sample=sample, prompt=replace(each.prompt, turn=turn))
        for turn, each in enumerate(sampled)
    ]


def test_trajectories_are_the_turns_of_one_sample() -> None:
    rollouts = [
        *turns(0, 0, "1", "2"),
        *turns(0, 1, "1"),
        *turns(0, 2, "1", "2", "3"),
        *turns(1, 3, "1", "2"),
    ]
    assert trajectories(rollouts) == [range(2), range(2, 3), range(3, 6), range(6, 8)]
    completions = turns(0, 0, "1") * 3  # samples of one prompt, without an agent
    assert trajectories(completions) == [range(1), range(1, 2), range(2, 3)]
    assert trajectories([]) == []


def test_the_reward_is_that_of_the_last_turn() -> None:
    config = RewardConfig.model_validate({"grader": "exact"})
    rollouts = [*turns(0, 0, "1", "7"), *turns(0, 1, "7", "1")]
    rollouts = [replace(e, prompt=replace(e.prompt, metadata={"answer": "7"})) for e in rollouts]
    graded = RolloutGrader({"right": config}).graded(rollouts)
    assert [each.rewards["right"] for each in graded] == [1.0, 1.0, 0.0, 0.0]
    assert [each.prompt.turn for each in graded] == [0, 1, 0, 1]


def test_a_trajectory_counts_once_in_its_group() -> None:
    first = rewarded(index=0, first=1.0)
    long = [
        TrainingExample(replace(first.rollout, prompt=replace(first.rollout.prompt, turn=turn)), ())
        for turn in range(3)
    ]
    others = [rewarded(index=0, first=0.0), rewarded(index=0, first=0.0)]
    others = [
        replace(each, rollout=replace(each.rollout, sample=sample))
        for sample, each in enumerate(others, 1)
    ]
    config = ReinforcementConfig(normalize=False)
    kept, _ = with_advantages([*long, *others], {"first": RewardConfig()}, config)
    expected = [2 / 3] * 3 + [-1 / 3] * 2
    np.testing.assert_allclose([each.advantage for each in kept], expected)
