"""Which completions of a step are kept for people to read."""

from collections import Counter
from collections.abc import Sequence

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import of_source


def shown_examples(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    """Up to ``count`` of either source: those of every teacher in turn, in the step's order."""
    answers, rollouts = of_source(examples, "answers"), of_source(examples, "rollout")
    return [*_in_turn(answers)[:count], *_in_turn(rollouts)[:count]]


def _in_turn(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """The first of each teacher (or set of teachers), then the second of each, and so on."""
    seen: Counter[tuple[str, ...]] = Counter()
    turns: list[int] = []
    for example in examples:
        teachers = tuple(sorted(example.rollout.prompt.teachers))
        turns.append(seen[teachers])
        seen[teachers] += 1
    return [examples[at] for at in sorted(range(len(examples)), key=lambda at: turns[at])]
