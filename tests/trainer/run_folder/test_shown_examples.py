"""The completions that people read are of all teachers."""

from collections.abc import Sequence
from dataclasses import replace

from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.run_folder.shown_examples import shown_examples
from tests.trainer.judged import example
from tests.trainer.students import rollout


def of_teachers(names: Sequence[str]) -> list[TrainingExample]:
    """One example a name, numbered in order; ``x+y`` are two teachers."""
    return [
        example(rollout("digit", [70], teachers=dict.fromkeys(name.split("+"), 1.0), index=index))
        for index, name in enumerate(names)
    ]


def places(shown: Sequence[TrainingExample]) -> list[int]:
    return [one.rollout.prompt.index for one in shown]


def test_every_teacher_has_its_turn() -> None:
    chosen = of_teachers(["math", "math", "math", "code", "math", "code", "math+code"])
    assert places(shown_examples(chosen, 2)) == [0, 3]
    assert places(shown_examples(chosen, 3)) == [0, 3, 6]
    assert places(shown_examples(chosen, 5)) == [0, 3, 6, 1, 5]
    assert places(shown_examples(chosen, 100)) == [0, 3, 6, 1, 5, 2, 4]
    assert shown_examples(chosen, 0) == []
    assert shown_examples([], 2) == []


def test_each_source_has_as_many() -> None:
    chosen = of_teachers(["math", "math", "math", "math"])
    for at in (1, 2):
        written = replace(chosen[at].rollout, sampled_logprobs=None)
        chosen[at] = replace(chosen[at], rollout=written)
    assert places(shown_examples(chosen, 1)) == [1, 0]
