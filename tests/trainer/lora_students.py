"""Tiny LoRA students, and steps of theirs."""

from pathlib import Path
from typing import Any

import torch

from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests import tiny_models
from tests.trainer.scored_examples import losses_for
from tests.trainer.students import model_of, tokenizer
from tests.trainer.training.test_learner import TEACHER_WEIGHTS, examples

#: Settings of every LoRA student, unless a test overrides them.
LORA: dict[str, Any] = {"rank": 4, "alpha": 8}


def base_in(folder: Path, seed: int = 0) -> Path:
    """Save a model whose logits are not nearly uniform."""
    return tiny_models.save(model_of("qwen", seed, sharpness=4.0), tokenizer("digit"), folder)


def config_in(folder: Path, lora: dict[str, Any] | None = LORA, **settings: Any) -> StudentConfig:
    """Settings of a student whose model is in the folder."""
    values = {"model": str(folder), "device": "cpu", "learning_rate": 1e-2, "lora": lora}
    return StudentConfig.model_validate(values | settings)


def moved(student: Student, seed: int = 1) -> Student:
    """With adapters that do something: fresh ones add nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in student.trained().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return student


def learner_for(student: Student, config: StudentConfig) -> Learner:
    """Return a learner for ten steps on the examples of ``test_learner``."""
    return Learner(
        student,
        config,
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )


def step(learner: Learner, number: int, budget: int = 60) -> dict[str, float]:
    """Return the metrics of a step on all examples; steps count from 0."""
    tokens = sum(len(example.rollout.completion) for example in examples())
    batches = pack(examples(), tokens_per_micro_batch=budget)
    return learner.update(batches, tokens=tokens, step=number)[0]
