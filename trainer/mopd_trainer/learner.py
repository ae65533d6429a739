"""``Learner``: micro-batches -> one optimizer step."""

import math
from collections.abc import Iterable, Mapping

import torch

from mopd_losses.blockwise_head import LossTerm
from mopd_losses.loss import Loss
from mopd_losses.supervised import IGNORED, SftLoss, label_targets, mixed_terms
from mopd_trainer.config import StudentConfig
from mopd_trainer.measurements import LabelMeasurements, LossMeasurements, Metrics
from mopd_trainer.packing import MicroBatch
from mopd_trainer.seeds import derived_seed
from mopd_trainer.student import Student
from mopd_trainer.update_guard import UpdateGuard


class Learner:
    """AdamW on the student, with one division by the step's token count and nowhere else.

    A reference answer's tokens share their weight between cross entropy and the teachers, by
    ``distill_loss_weight``; those that the student wrote are the teachers' alone.

    Everything random is seeded by the step, and the learning rate is a function of the step, so
    that the optimizer's moments are all the state there is.
    """

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
        self._guard = UpdateGuard(config)
        self.optimizer = torch.optim.AdamW(
            student.model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )

    def update(
        self, micro_batches: Iterable[MicroBatch], *, tokens: int, step: int
    ) -> tuple[Metrics, dict[str, LossMeasurements]]:
        """One optimizer step on all micro-batches together; its metrics, and each teacher's losses.

        Args:
            tokens: completion tokens of the whole step, which the summed loss is divided by.
            step: counted from 0.

        Raises:
            DataError: when the gradient is not to be followed, see ``UpdateGuard``; the weights are
                then as before.
        """
        torch.manual_seed(derived_seed(self._seed, step))  # dropout, where a model has it
        self._student.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        measured: dict[str, LossMeasurements] = {}
        supervised = LabelMeasurements()
        total = 0.0
        for batch in micro_batches:
            total += self._backward(batch, tokens, measured, supervised)
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self._student.model.parameters(), self._config.max_grad_norm
            )
        )
        skipped = self._guard.judge(loss=total, norm=norm, step=step)
        rate = learning_rate(self._config, step=step, max_steps=self._max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if not any(skipped.values()):
            self.optimizer.step()
        metrics = {"loss": total, "grad_norm": norm, "learning_rate": rate}
        return metrics | skipped | supervised.metrics(), measured

    def _backward(
        self,
        batch: MicroBatch,
        tokens: int,
        measured: dict[str, LossMeasurements],
        supervised: LabelMeasurements,
    ) -> float:
        """Adds a micro-batch's gradient; its share of the step's loss, in nats per token."""
        sft, *distilled = self._terms(batch, tokens)
        total, outputs = self._student.losses(
            batch,
            [*distilled, sft] if batch.answers else distilled,
            rows_per_block=self._config.rows_per_block,
        )
        if batch.answers:
            supervised.add(outputs.pop(), batch.labels)
        for name, output in zip(batch.teachers, outputs, strict=True):
            measured.setdefault(name, LossMeasurements()).add(output)
        total.backward()
        return float(total.detach())

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
