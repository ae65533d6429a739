"""Reference answers as rollouts."""

from collections.abc import Sequence

import numpy as np

from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise
from mopd_protocol import Prompt, Rollout
from mopd_trainer import Student


def reference_rollouts(
    student: Student,
    encoder: Encoder,
    exercises: Sequence[Exercise],
    prompts: Sequence[Prompt],
    step: int,
) -> list[Rollout]:
    """Return the reference answers of exercises, as if the student had sampled them."""
    return [
        Rollout(
            prompt=prompt,
            prompt_token_ids=np.array(student.prompt_token_ids(prompt.messages), dtype=np.int32),
            completion=student.table.sequence(ids),
            sampled_logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop",
            policy_version=step,
        )
        for exercise, prompt in zip(exercises, prompts, strict=True)
        for ids in [encoder.completion(exercise)]
    ]
