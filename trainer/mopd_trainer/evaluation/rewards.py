"""``RolloutGrader``: the rewards of sampled completions, and which of them teachers score."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mopd_protocol.samples import Rollout
from mopd_trainer.config.rewards import ReinforcementConfig, RewardConfig
from mopd_trainer.data.advantages import with_advantages
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.prompts import reward_reference
from mopd_trainer.data.trajectories import trajectories
from mopd_trainer.evaluation.graders import graders_of

_DEFAULTS = ReinforcementConfig()


class RolloutGrader:
    """Grade sampled completions with the rewards of a run.

    Raises:
        ConfigError: if a user's function cannot be imported.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        reinforcement: ReinforcementConfig = _DEFAULTS,
    ) -> None:
        self.rewards = rewards
        self._reinforcement = reinforcement
        self._graders = graders_of(rewards)

    def graded(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with the rewards that they do not have; reference answers have none.

        The reward of a trajectory is that of its last turn.

        Raises:
            DataError: for a score of a user's function outside of 0 to 1.
        """
        if not self.rewards:
            return list(rollouts)
        graded: list[Rollout] = []
        for places in trajectories(rollouts):
            turns = [rollouts[place] for place in places]
            if turns[-1].source == "rollout":
                rewards = self._rewards_of(turns[-1])
                turns = [replace(each, rewards=rewards) for each in turns]
            graded += turns
        return graded

    def gated(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts, without teachers where ``distill`` excludes a completion."""
        return [
            replace(each, prompt=replace(each.prompt, teachers={}))
            if self._excludes(each)
            else each
            for each in rollouts
        ]

    def with_advantages(
        self, examples: Sequence[TrainingExample]
    ) -> tuple[list[TrainingExample], dict[str, float]]:
        """Grade the completions of a recording that lacks rewards; see ``with_advantages``."""
        if not self.rewards:
            return list(examples), {}
        graded = self.graded([each.rollout for each in examples])
        changed = [replace(e, rollout=r) for e, r in zip(examples, graded, strict=True)]
        return with_advantages(changed, self.rewards, self._reinforcement)

    def _rewards_of(self, rollout: Rollout) -> dict[str, float]:
        text = rollout.completion.text.decode("utf-8", "replace")
        finished = rollout.finish_reason == "stop"
        prompt = rollout.prompt
        rewards = {
            name: grade(prompt, reward_reference(prompt, self.rewards[name]), text, finished)
            for name, grade in self._graders.items()
            if name not in rollout.rewards
        }
        known = {name: value for name, value in rollout.rewards.items() if name in self.rewards}
        return known | rewards

    def _excludes(self, rollout: Rollout) -> bool:
        excluding = {"failed": True, "passed": False}
        return bool(rollout.rewards) and any(
            (rollout.rewards[name] == 1) == excluding[config.distill]
            for name, config in self.rewards.items()
            if config.distill != "all"
        )
