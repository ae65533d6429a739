"""Choice of the completions of a step that are logged for the report."""

from collections import Counter
from collections.abc import Sequence

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.metrics.step_metrics import of_source


def shown_examples(examples: Sequence[TrainingExample], count: int) -> list[TrainingExample]:
    """Return up to ``count`` examples of each source, round robin over teachers, in order."""
    references, rollouts = of_source(examples, "answers"), of_source(examples, "rollout")
    return [*_round_robin(references)[:count], *_round_robin(rollouts)[:count]]


def _round_robin(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Order by rank within a teacher (or set of teachers): the first of each, then the second."""
    seen: Counter[tuple[str, ...]] = Counter()
    turns: list[int] = []
    for example in examples:
        teachers = tuple(sorted(example.rollout.prompt.teachers))
        turns.append(seen[teachers])
        seen[teachers] += 1
    return [examples[at] for at in sorted(range(len(examples)), key=lambda at: turns[at])]
