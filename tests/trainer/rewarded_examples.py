"""Training examples with rewards, and made-up scores if they have teachers."""

from collections.abc import Mapping
from dataclasses import replace

from mopd_trainer.data.examples import TrainingExample
from tests.trainer.scored_examples import example
from tests.trainer.students import ids_of, rollout


def rewarded(
    *,
    index: int,
    first: float,
    second: float = 0.0,
    teachers: Mapping[str, float] | None = None,
    text: str = "42",
    seed: int = 0,
) -> TrainingExample:
    """Return a sampled completion with three rewards."""
    sampled = rollout("digit", ids_of("digit", text, "<|end|>"), teachers=teachers, index=index)
    rewards = {"first": first, "second": second, "logged": first * second}
    sampled = replace(sampled, rewards=rewards)
    if teachers:
        return example(sampled, seed=seed)
    prompt = replace(sampled.prompt, teachers={})
    return TrainingExample(replace(sampled, prompt=prompt), ())
