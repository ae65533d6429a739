"""``Learner``: micro-batches -> one optimizer step."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mopd_losses.core.blockwise_head import LossTerm
from mopd_losses.core.cross_entropy import IGNORED, SftLoss, label_targets, mixed_terms
from mopd_losses.core.loss import Loss
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.packing import MicroBatch, split
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.distributed.full_state_adamw import WholeStateAdamW
from mopd_trainer.distributed.sharding import clip_gradients, is_sharded, sum_gradients
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics, StepMeasurements
from mopd_trainer.metrics.token_losses import token_losses
from mopd_trainer.student.student import Student
from mopd_trainer.training.update_guard import UpdateGuard


class Learner:
    """AdamW on the student, with one division by the step's token count and nowhere else.

    A reference answer's tokens share their weight between cross entropy and the teachers, by
    ``distill_loss_weight``; those that the student wrote are the teachers' alone.

    Everything random is seeded by the step, and the learning rate is a function of the step, so
    that the optimizer's moments are all the state there is.

    On several ranks each works on micro-batches of its own, with the token count of all; their
    gradients are summed, so that the step is the one that a single rank would make.
    """

    BEGIN = "learner.begin"
    UPDATE = "learner.update"

    def __init__(
        self,
        student: Student,
        config: StudentConfig,
        *,
        losses: Mapping[str, Loss],
        teacher_weights: Mapping[str, float],
        max_steps: int,
        seed: int,
    ) -> None:
        self._student = student
        self._config = config
        self._losses = losses
        self._teacher_weights = teacher_weights
        self._max_steps = max_steps
        self._seed = seed
        self._ranks = student.ranks
        self._ranks.lead(
            self.BEGIN,
            losses=dict(losses),
            teacher_weights=dict(teacher_weights),
            max_steps=max_steps,
            seed=seed,
        )
        self._guard = UpdateGuard(config)
        self.optimizer = WholeStateAdamW(
            student.trained().values(),
            ranks=self._ranks,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )

    def update(
        self,
        micro_batches: Iterable[MicroBatch],
        *,
        tokens: int,
        step: int,
        dropped: Metrics | None = None,
    ) -> tuple[Metrics, dict[str, LossMeasurements]]:
        """One optimizer step on all micro-batches together; its metrics, and each teacher's losses.

        Args:
            micro_batches: of the whole step; on a rank that follows, its own.
            tokens: completion tokens of the whole step, which the summed loss is divided by.
            step: counted from 0.
            dropped: why samples of the step were dropped, to be told where none is left.

        Returns:
            Of all ranks together; of its own on a rank that follows.

        Raises:
            DataError: when the step is not to be made, see ``UpdateGuard``; the weights are then as
                before.
            RankError: when another rank is gone.
        """
        rate = learning_rate(self._config, step=step, max_steps=self._max_steps)
        if tokens == 0:  # the other ranks need not know
            left_out = self._guard.judge_empty(dropped or {}, step=step)
            return {"loss": math.nan, "grad_norm": math.nan, "learning_rate": rate} | left_out, {}
        if self._ranks.leads:
            parts = split(list(micro_batches), self._ranks.size)
            micro_batches = self._ranks.deal(self.UPDATE, parts, tokens=tokens, step=step)
        place = (step, self._ranks.rank) if self._ranks.rank else (step,)
        torch.manual_seed(derived_seed(self._seed, *place))  # dropout, where a model has it
        self._student.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        measured = StepMeasurements()
        with self._ranks.together():
            for batch in micro_batches:
                self._backward(batch, tokens, measured)
            norm = self._gradient_norm()
        for others in self._ranks.collect(measured)[1:]:
            measured.add(others)
        skipped: Metrics = {}
        if self._ranks.rank == 0:
            skipped = self._guard.judge(loss=measured.total, norm=norm, step=step)
        followed = self._ranks.agreed(not any(skipped.values()))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if followed:
            self.optimizer.step()
            self._student.weights_changed()
        metrics = {"loss": measured.total, "grad_norm": norm, "learning_rate": rate}
        return metrics | skipped | measured.labels.metrics(), measured.teachers

    def led(self) -> dict[str, Callable[..., Any]]:
        """What a rank that follows does with its learner when it is told to."""
        return {
            self.UPDATE: self.update,
            WholeStateAdamW.STATE: self.optimizer.state_dict,
            WholeStateAdamW.TAKE: self.optimizer.take,
        }

    def _gradient_norm(self) -> float:
        """Of all ranks' gradients together, before they are clipped."""
        parameters = list(self._student.trained().values())
        if self._ranks.size > 1 and not is_sharded(self._student.model):
            sum_gradients(parameters)
        return clip_gradients(parameters, self._config.max_grad_norm)

    def _backward(self, batch: MicroBatch, tokens: int, measured: StepMeasurements) -> None:
        """Adds a micro-batch's gradient, and its share of the step's loss in nats per token."""
        sft, *distilled = self._terms(batch, tokens)
        total, outputs = self._student.losses(
            batch,
            [*distilled, sft] if batch.answers else distilled,
            rows_per_block=self._config.rows_per_block,
        )
        if batch.answers:
            measured.labels.add(outputs.pop(), batch.labels)
        for name, output in zip(batch.teachers, outputs, strict=True):
            loss = measured.teachers.setdefault(name, LossMeasurements())
            loss.add(output)
            loss.shown |= token_losses(output, batch.teachers[name], batch.shown)
        total.backward()
        measured.total += float(total.detach())

    def _terms(self, batch: MicroBatch, tokens: int) -> list[LossTerm]:
        """Cross entropy on the reference answers, then every teacher's loss."""
        device = self._student.device
        labels = batch.labels.to(device)
        each = torch.full(labels.shape, 1 / tokens, device=device)
        distilled = [
            LossTerm(
                self._losses[name],
                self._losses[name].targets(part.comparisons, part.slot_offsets).to(device),
                part.slot_weights.to(device) * (self._teacher_weights[name] / tokens),
            )
            for name, part in batch.teachers.items()
        ]
        return mixed_terms(
            LossTerm(SftLoss(), label_targets(labels), each),
            distilled,
            distill_weights=torch.where(labels == IGNORED, 1.0, self._config.distill_loss_weight),
        )


def learning_rate(config: StudentConfig, *, step: int, max_steps: int) -> float:
    """Linear warm-up, then a cosine down to ``min_learning_rate_ratio``; steps count from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
