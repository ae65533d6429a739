"""Group-relative advantages: the rewards of a completion against those of the same prompt.

For a reward ``r`` with weight ``w``, and mean and standard deviation (of the population) over the
completions of a prompt that a step trains on,

    A = sum over the rewards of w * (r - mean) / (deviation + 1e-6)

(GRPO, arXiv 2402.03300, section 4.1.2, each reward separately); without ``normalize``
``w * (r - mean)`` (arXiv 2503.20783). A group whose completions have the same rewards has
advantage 0. All turns of a trajectory have its advantage. Advantages depend on the complete step
and are computed once, before it is packed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from mopd_trainer.config.rewards import ReinforcementConfig, RewardConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.trajectories import trajectories

_LEAST_DEVIATION = 1e-6

Rewards = Mapping[str, RewardConfig]


def with_advantages(
    examples: Sequence[TrainingExample], rewards: Rewards, config: ReinforcementConfig
) -> tuple[list[TrainingExample], dict[str, float]]:
    """Return the examples of a step with their advantages, and ``reward/…``,
    ``reinforcement/…`` and ``dropped/…``.

    Sampled completions without a score and without an advantage are dropped: those that
    ``distill`` excludes if no reward has a weight, and with ``filter_groups`` those of groups
    without spread.
    """
    weighted = {name: each for name, each in rewards.items() if each.weight}
    groups: dict[int, list[range]] = {}
    for places in trajectories([each.rollout for each in examples]):
        rollout = examples[places[-1]].rollout
        if weighted and rollout.rewards:
            groups.setdefault(rollout.prompt.index, []).append(places)
    metrics = _reward_means(examples, rewards)
    weights = np.array([each.weight for each in weighted.values()])
    advantages: dict[int, float] = {}
    spread = 0
    for group in groups.values():
        members = [examples[places[-1]].rollout.rewards for places in group]
        values = np.array([[each[name] for each in members] for name in weighted])
        has_spread = bool((np.ptp(values, axis=1) > 0).any())
        spread += has_spread
        if has_spread or not config.filter_groups:
            own: list[float] = group_advantages(
                values, weights, normalize=config.normalize
            ).tolist()
            for places, advantage in zip(group, own, strict=True):
                advantages |= dict.fromkeys(places, advantage)
    if groups:
        metrics["reinforcement/spread_share"] = spread / len(groups)
    changed = [replace(e, advantage=advantages.get(place)) for place, e in enumerate(examples)]
    kept = [each for each in changed if not _is_untrained(each)]
    if len(kept) < len(changed):
        dropped = float(len(changed) - len(kept))
        reason = "no_spread" if weighted else "not_distilled"
        metrics |= {f"dropped/{reason}": dropped, "dropped/total": dropped}
    return kept, metrics


def group_advantages(
    rewards: NDArray[np.float64], weights: NDArray[np.float64], *, normalize: bool
) -> NDArray[np.float64]:
    """Return the advantage of each completion of a group: [completions].

    Args:
        rewards: [rewards, completions].
        weights: [rewards].
        normalize: divide by the standard deviation.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    centred[np.ptp(rewards, axis=1) == 0] = 0.0  # the mean of equal values may be rounded
    if normalize:
        centred /= rewards.std(axis=1, keepdims=True) + _LEAST_DEVIATION
    return weights @ centred


def _reward_means(examples: Sequence[TrainingExample], rewards: Rewards) -> dict[str, float]:
    """Return ``reward/<name>``: the mean of each reward over the graded completions."""
    graded = [each.rollout.rewards for each in examples if each.rollout.rewards]
    if not graded:
        return {}
    return {f"reward/{name}": fsum(e[name] for e in graded) / len(graded) for name in rewards}


def _is_untrained(example: TrainingExample) -> bool:
    """Return True for a completion that no term trains."""
    sampled = example.rollout.source == "rollout"
    return sampled and not example.scores and example.advantage is None
