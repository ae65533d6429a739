"""``RewardConfig`` and ``ReinforcementConfig``: rewards of sampled completions."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from mopd_trainer.config.grading import GraderConfig
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.config.settings import Settings, invalid


class RewardConfig(GraderConfig):
    """A reward: the score, from 0 to 1, of each sampled completion."""

    weight: float = Field(default=1.0, ge=0)
    """Weight of the reward's advantage; that of the teachers' losses is ``teachers.NAME.weight``.
    0: the reward is only logged, and decides by ``distill``."""
    distill: Literal["all", "failed", "passed"] = "all"
    """Completions that teachers score: ``all``, those that ``failed``, or those that ``passed``; a
    completion passes with a score of 1. The others are trained by their rewards only, or, if no
    reward has a weight, dropped and counted."""

    @field_validator("grader")
    @classmethod
    def _validate_completion_grader(cls, grader: str) -> str:
        if grader == "log_likelihood":
            raise ValueError("'log_likelihood' grades no completion. Use another grader")
        return grader


class ReinforcementConfig(Settings):
    """The estimator of ``rewards``: PPO's clipped ratio with group-relative advantages.

    With the mean and the standard deviation (of the population) of a reward over the completions of
    a prompt in a step, the advantage of each token of a completion is the sum over the rewards of
    ``weight * (reward - mean) / (deviation + 1e-6)`` (GRPO, arXiv 2402.03300). Each reward is
    normalized separately, so that ``weight`` is the share of the reward.
    """

    clip: float = Field(default=0.2, gt=0, lt=1)
    """Distance from 1 at which the importance ratio of a token is clipped."""
    normalize: bool = True
    """Divide by the standard deviation; ``false``: ``weight * (reward - mean)``, which gives groups
    that are almost always right or wrong no extra weight (arXiv 2503.20783)."""
    filter_groups: bool = False
    """Groups in which all completions have the same rewards have no gradient. ``true`` removes them
    from the average of the reward term too (arXiv 2503.14476), and drops and counts completions
    without a teacher's score."""


def require_valid_rewards(
    rewards: Mapping[str, RewardConfig], rollout: RolloutConfig, *, sampled: bool, taught: bool
) -> None:
    """Check that rewards are possible with the sampling settings.

    Args:
        sampled: the student samples completions.
        taught: the run has teachers.

    Raises:
        ConfigError: rewards require other samples, or teachers.
    """
    if not rewards:
        return
    if not sampled:
        raise invalid(
            "rewards",
            "only sampled completions have rewards (found data.source 'answers'). Set it to "
            "'rollout', or data.on_policy_fraction above 0.",
        )
    if rollout.temperature == 0 or rollout.top_p < 1:
        raise invalid(
            "rewards",
            "importance ratios need samples of the whole distribution (found rollout.temperature "
            f"{rollout.temperature:g} and rollout.top_p {rollout.top_p:g}, expected above 0 and "
            "1). Set both to 1.",
        )
    if rollout.corrections:
        raise invalid(
            "rewards",
            f"corrected tokens are not samples of the student (found rollout.corrections "
            f"{rollout.corrections}, expected 0). Set it to 0.",
        )
    for name, reward in rewards.items():
        if reward.distill != "all" and not taught:
            raise invalid(
                f"rewards.{name}.distill",
                f"no teacher to score completions (found {reward.distill!r}). Add a teacher, or "
                "set it to 'all'.",
            )
        if reward.weight and rollout.samples_per_prompt == 1:
            raise invalid(
                "rollout.samples_per_prompt",
                f"the advantage of reward {name!r} compares the completions of a prompt (found 1, "
                "expected at least 2). Set it to 4 or more, or the weight of the reward to 0.",
            )
