"""The logged completions are of all teachers."""

from collections.abc import Sequence
from dataclasses import replace

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.run_folder.shown_examples import shown_examples
from tests.trainer.scored_examples import example
from tests.trainer.students import rollout


def of_teachers(names: Sequence[str]) -> list[TrainingExample]:
    """Return an example for each name, numbered in order; ``x+y`` are two teachers."""
    return [
        example(rollout("digit", [70], teachers=dict.fromkeys(name.split("+"), 1.0), index=index))
        for index, name in enumerate(names)
    ]


def indices(shown: Sequence[TrainingExample]) -> list[int]:
    return [example.rollout.prompt.index for example in shown]


def test_teachers_alternate() -> None:
    chosen = of_teachers(["math", "math", "math", "code", "math", "code", "math+code"])
    assert indices(shown_examples(chosen, 2)) == [0, 3]
    assert indices(shown_examples(chosen, 3)) == [0, 3, 6]
    assert indices(shown_examples(chosen, 5)) == [0, 3, 6, 1, 5]
    assert indices(shown_examples(chosen, 100)) == [0, 3, 6, 1, 5, 2, 4]
    assert shown_examples(chosen, 0) == []
    assert shown_examples([], 2) == []


def test_sources_have_equal_numbers() -> None:
    chosen = of_teachers(["math", "math", "math", "math"])
    for index in (1, 2):
        reference = replace(chosen[index].rollout, sampled_logprobs=None)
        chosen[index] = replace(chosen[index], rollout=reference)
    assert indices(shown_examples(chosen, 1)) == [1, 0]
