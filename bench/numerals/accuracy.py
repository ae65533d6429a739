"""Greedy exact-match accuracy of a model on exercises."""

from collections.abc import Sequence
from pathlib import Path

from mopd.demo.tasks import Exercise
from mopd_protocol import Prompt
from mopd_trainer import (
    EvaluationSet,
    EvaluationSetConfig,
    RolloutConfig,
    Sampler,
    Student,
    StudentModel,
    evaluate_set,
)


async def accuracy(student: Student, exercises: Sequence[Exercise], max_new_tokens: int) -> float:
    """Return the share of exercises whose greedy completion is correct and ends its turn."""
    rollout = RolloutConfig(max_new_tokens=max_new_tokens)
    model = StudentModel(student, Sampler(student, rollout, seed=0))
    prompts = [
        Prompt(index=index, messages=exercise.messages, teachers={})
        for index, exercise in enumerate(exercises)
    ]
    config = EvaluationSetConfig(prompts=Path("held-out.jsonl"), samples=0)
    references = [exercise.completion for exercise in exercises]
    held_out = EvaluationSet.of("held-out", config, prompts, references)
    return (await evaluate_set(model, held_out, rollout, seed=0)).metrics()["accuracy"]
