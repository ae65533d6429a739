"""Turns of one trajectory among the completions of a step."""

from collections.abc import Sequence

from mopd_protocol.samples import Rollout


def trajectories(rollouts: Sequence[Rollout]) -> list[range]:
    """Return the places of each trajectory: one completion, or the turns of an agent's
    conversation, which follow one another.

    Args:
        rollouts: in the order of a step.
    """
    ends = [
        place
        for place in range(1, len(rollouts) + 1)
        if place == len(rollouts) or not _continues(rollouts[place], rollouts[place - 1])
    ]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _continues(rollout: Rollout, before: Rollout) -> bool:
    same_prompt = rollout.prompt.index == before.prompt.index
    return same_prompt and rollout.sample == before.sample and rollout.turn > before.turn
