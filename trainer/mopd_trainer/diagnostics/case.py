"""``Case``: a student, its teachers, and a few scored completions, which the checks share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mopd_client.pool import TeacherPool
from mopd_losses.core.blockwise_head import LossTerm
from mopd_losses.core.loss import Loss
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import pack
from mopd_trainer.rollouts.reference_completions import ReferenceCompletions
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.scoring import RolloutScorer

#: Completions of each teacher.
_PER_TEACHER = 8


@dataclass(frozen=True, eq=False)
class Case:
    """The inputs of all checks that need weights."""

    config: RunConfig
    student: Student
    pool: TeacherPool
    teachers: dict[str, Teacher]
    losses: dict[str, Loss]
    prompts: Sequence[Prompt]  # of all teachers
    rollouts: Sequence[Rollout]  # of the prompts, sampled or reference answers
    examples: Sequence[TrainingExample]  # the rollouts that have an aligned score

    def examples_of(self, teacher: str) -> list[TrainingExample]:
        """Return the examples with a score of a teacher, without the other scores."""
        return [
            replace(example, scores=scores)
            for example in self.examples
            if (scores := tuple(s for s in example.scores if s.teacher == teacher))
        ]


async def open_case(
    config: RunConfig,
    prompts: Sequence[Prompt],
    student: Student,
    pool: TeacherPool,
    teachers: dict[str, Teacher],
    losses: dict[str, Loss],
) -> Case:
    """Sample (or take the reference answers of) a few prompts of each teacher, and score them.

    Raises:
        MopdError: when sampling or scoring fails.
    """
    chosen = _chosen(prompts)
    rollouts = await complete(config, student, chosen)
    scorer = RolloutScorer(pool, teachers, student.table)
    examples = await scorer.score(rollouts)
    return Case(config, student, pool, teachers, losses, chosen, rollouts, examples)


async def complete(config: RunConfig, student: Student, prompts: Sequence[Prompt]) -> list[Rollout]:
    """Return completions of the kind that the run trains on."""
    rollout = config.rollout.model_copy(update={"samples_per_prompt": 1, "max_staleness": 0})
    source = Sampler(student, rollout, seed=config.seed)
    if config.data.rollout_share == 0:
        source = ReferenceCompletions(
            student.identity,
            rollout,
            max_length=student.max_length,
            scored=config.scores_reference_answers,
        )
    batches = [batch async for batch in source.sample(prompts, step=0)]
    return [each for batch in batches for each in batch.rollouts]


def loss_of(
    student: Student, name: str, loss: Loss, examples: Sequence[TrainingExample], config: RunConfig
) -> tuple[Tensor, float]:
    """Return the loss in nats per student token, with a graph, and the mean absolute loss.

    Computed in training mode; dropout, if there is any, is the same in every call.
    """
    torch.manual_seed(config.seed)
    student.model.train()
    tokens = sum(len(example.rollout.completion) for example in examples)
    total = torch.zeros((), device=student.device)
    size = 0.0
    for batch in pack(examples, tokens_per_micro_batch=config.student.tokens_per_micro_batch):
        part = batch.teachers[name]
        targets = loss.targets(part.comparisons, part.slot_offsets).to(student.device)
        term = LossTerm(loss, targets, part.slot_weights.to(student.device) / tokens)
        nats, outputs = student.losses(batch, [term], rows_per_block=config.student.rows_per_block)
        total = total + nats
        size += float(outputs[0].per_token.detach().abs().sum()) / tokens
    return total, size


def _chosen(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompts of each teacher, or of each set of teachers."""
    seen: Counter[tuple[str, ...]] = Counter()
    chosen: list[Prompt] = []
    for prompt in prompts:
        key = tuple(sorted(prompt.teachers))
        seen[key] += 1
        if seen[key] <= _PER_TEACHER:
            chosen.append(prompt)
    return chosen
