"""The reward term of an optimizer step: its gradient, with and without a teacher's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopd_trainer.config.rewards import ReinforcementConfig, RewardConfig
from mopd_trainer.data.advantages import with_advantages
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import pack
from mopd_trainer.student.student import Student
from tests.trainer.rewarded_examples import rewarded
from tests.trainer.students import CPU, model_of, tokenizer
from tests.trainer.training.test_learner import FREELY, examples, gradients, learner_of

REWARDS = {"first": RewardConfig(weight=2.0)}
#: Distance of rounding, in float64 but for weights and log-probabilities of samples.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}


def double_student() -> Student:
    return Student(model_of("qwen").double(), tokenizer("digit"), CPU)


def rewarded_examples() -> list[TrainingExample]:
    """Return two groups, the second without spread, whose tokens were about as likely then."""
    items = [
        rewarded(index=0, first=1.0, text="12 + 3"),
        rewarded(index=0, first=0.0, text="7"),
        rewarded(index=0, first=0.25, text="的"),
        rewarded(index=1, first=1.0, text="8"),
        rewarded(index=1, first=1.0, text="9 9"),
    ]
    student = double_student()
    changed: list[TrainingExample] = []
    for number, item in enumerate(items):
        ids = item.rollout.completion.token_ids.tolist()
        now = student.logprobs(item.rollout.prompt_token_ids.tolist(), ids)
        noise = np.random.default_rng(number).normal(0, 0.3, len(ids))
        changed.append(replace(item, rollout=replace(item.rollout, sampled_logprobs=now + noise)))
    return with_advantages(changed, REWARDS, ReinforcementConfig())[0]


def gradient(items: list[TrainingExample], budget: int = 10_000) -> list[Tensor]:
    student = double_student()
    tokens = sum(len(item.rollout.completion) for item in items)
    batches = list(pack(items, tokens_per_micro_batch=budget))
    metrics, _ = learner_of(student, **FREELY).update(batches, tokens=tokens, step=0)
    assert np.isfinite(metrics["objective"])
    return gradients(student)


def slow_gradient(items: list[TrainingExample]) -> list[Tensor]:
    """The mean over all tokens of the clipped surrogate, one context at a time."""
    student = double_student()
    real = student.table.present.nonzero()[0].tolist()
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(item.rollout.completion) for item in items)
    for item in items:
        prompt, ids = (
            item.rollout.prompt_token_ids.tolist(),
            item.rollout.completion.token_ids.tolist(),
        )
        assert item.rollout.sampled_logprobs is not None
        assert item.advantage is not None
        for row, token in enumerate(ids):
            logits = student.model(torch.tensor([[*prompt, *ids[:row]]])).logits[0, -1]
            now = logits[token] - logits[real].logsumexp(0)
            ratio = (now - float(item.rollout.sampled_logprobs[row])).exp()
            clipped = ratio.clamp(0.8, 1.2)
            total = total - torch.minimum(ratio * item.advantage, clipped * item.advantage)
    student.model.zero_grad()
    (total / tokens).backward()
    return gradients(student)


def test_the_gradient_is_the_mean_clipped_surrogate() -> None:
    items = rewarded_examples()
    for value, expected in zip(gradient(items), slow_gradient(items), strict=True):
        torch.testing.assert_close(value, expected, **CLOSE)


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_the_sum_with_distillation_does_not_depend_on_micro_batches(budget: int) -> None:
    taught, items = examples(), rewarded_examples()
    separate = zip(gradient(taught), gradient(items), strict=True)
    both = gradient([*taught, *items], budget)
    tokens, others = (sum(len(i.rollout.completion) for i in each) for each in (taught, items))
    share = tokens / (tokens + others)
    for value, (distilled, reinforced) in zip(both, separate, strict=True):
        torch.testing.assert_close(value, share * distilled + reinforced, **CLOSE)


def test_metrics_are_of_the_tokens_with_an_advantage() -> None:
    items = rewarded_examples()
    student = double_student()
    tokens = sum(len(item.rollout.completion) for item in items)
    learner = learner_of(student, **FREELY)
    metrics, _ = learner.update(pack(items, tokens_per_micro_batch=20), tokens=tokens, step=0)
    assert np.isnan(metrics["loss"])
    assert np.isnan(metrics["compared_share"])
    assert 0 < metrics["reinforcement/clipped_share"] < 1
    assert metrics["reinforcement/importance_ratio_mean"] == pytest.approx(1, abs=0.3)
    metrics, _ = learner_of(double_student()).update(
        pack(examples(), tokens_per_micro_batch=20), tokens=tokens, step=0
    )
    assert not [name for name in metrics if name.startswith("reinforcement/")]
