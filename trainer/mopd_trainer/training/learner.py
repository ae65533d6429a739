"""``Learner``: micro-batches -> one optimizer step."""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from mopd_losses.core.blockwise_head import LossTerm
from mopd_losses.core.cross_entropy import IGNORED, SftLoss, label_targets, mixed_terms
from mopd_losses.core.loss import Loss
from mopd_losses.sampled.clipped_ratio import ClippedRatioLoss
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.data.packing import MicroBatch
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.distributed.full_state_adamw import FullStateAdamW
from mopd_trainer.distributed.sharding import clip_gradients, is_sharded, sum_gradients
from mopd_trainer.metrics.step_metrics import LossMeasurements, Metrics, StepMeasurements
from mopd_trainer.metrics.token_losses import token_losses
from mopd_trainer.student.student import Student
from mopd_trainer.training.update_guard import UpdateGuard


class Learner:
    """AdamW on the student; the only place that divides a loss by the step's token count.

    The weight of a reference answer's tokens is split between cross entropy and the teachers by
    ``distill_loss_weight``; the weight of sampled tokens is the teachers'. The reward term is added
    to both, in the same backward pass.

    Dropout is seeded by the step and the learning rate is a function of the step, so that the
    optimizer's moments are the complete state.

    Each rank trains on its own micro-batches with the token count of all ranks; gradients are
    summed, so the update equals that of a single rank.
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
        reward_loss: ClippedRatioLoss | None = None,
    ) -> None:
        self._student = student
        self._config = config
        self._losses = losses
        self._teacher_weights = teacher_weights
        self._max_steps = max_steps
        self._seed = seed
        self._reward_loss = reward_loss or ClippedRatioLoss()
        self._ranks = student.ranks
        self._guard = UpdateGuard(config)
        self.optimizer = FullStateAdamW(
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
        """Make one optimizer step; all ranks must call it.

        Args:
            micro_batches: of this rank.
            tokens: completion tokens of the step on all ranks, the divisor of the summed loss.
            step: counted from 0.
            dropped: ``dropped/…``, reported when the step has no sample.

        Returns:
            Metrics and each teacher's losses: of all ranks on rank 0, of this rank elsewhere.

        Raises:
            TrainingError: when ``UpdateGuard`` ends the run; the weights are unchanged.
            RankError: when another rank is lost.
        """
        rate = self._config.learning_rate_at(step, max_steps=self._max_steps)
        if tokens == 0:
            skipped = self._guard.check_empty(dropped or {}, step=step)
            nothing = dict.fromkeys(("loss", "compared_share", "objective", "grad_norm"), math.nan)
            return nothing | {"learning_rate": rate} | skipped, {}
        rank = (self._ranks.rank,) if self._ranks.rank else ()
        torch.manual_seed(derived_seed(self._seed, step, *rank))  # dropout
        self._student.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        measured = StepMeasurements()
        with self._ranks.collective():
            for batch, terms in self._prepared(micro_batches, tokens):
                self._backward(batch, terms, measured)
            norm = self._gradient_norm()
        for other in self._ranks.gather(measured)[1:]:
            measured.merge(other)
        skipped = {}
        if self._ranks.is_rank_zero:
            skipped = self._guard.check(loss=measured.total, norm=norm, step=step)
        applied = self._ranks.broadcast(not any(skipped.values()))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if applied:
            self.optimizer.step()
            self._student.weights_changed()
        metrics = measured.metrics() | {"grad_norm": norm, "learning_rate": rate}
        return metrics | skipped, measured.teachers

    def _gradient_norm(self) -> float:
        """Return the norm over all ranks, and clip the gradients."""
        parameters = list(self._student.trained().values())
        if self._ranks.size > 1 and not is_sharded(self._student.model):
            sum_gradients(parameters)
        return clip_gradients(parameters, self._config.max_grad_norm)

    def _prepared(
        self, micro_batches: Iterable[MicroBatch], tokens: int
    ) -> Iterator[tuple[MicroBatch, list[LossTerm]]]:
        """Yield each micro-batch with its terms, and prepare those of the next one meanwhile.

        The preparation of a cross-tokenizer loss takes as long as the gradient, on the CPU.
        """
        with ThreadPoolExecutor(1) as thread:
            previous: tuple[MicroBatch, Future[list[LossTerm]]] | None = None
            for batch in micro_batches:
                terms = thread.submit(self._terms, batch, tokens)
                if previous:
                    yield previous[0], previous[1].result()
                previous = batch, terms
            if previous:
                yield previous[0], previous[1].result()

    def _backward(
        self, batch: MicroBatch, terms: list[LossTerm], measured: StepMeasurements
    ) -> None:
        """Add the gradient of a micro-batch, and its loss in nats per token of the step."""
        device = self._student.device
        sft, *distillation = terms
        rewards = [] if batch.rewards is None else [distillation.pop()]
        important = [
            replace(term, position_weights=term.position_weights * part.importance.to(device))
            for term, part in zip(distillation, batch.teachers.values(), strict=True)
        ]
        total, outputs = self._student.losses(
            batch,
            [*important, *([sft] if batch.has_labels else []), *rewards],
            rows_per_block=self._config.rows_per_block,
        )
        if rewards:
            measured.rewards.add(outputs.pop())
        if batch.has_labels:
            measured.labels.add(outputs[-1], batch.labels)
            measured.add(outputs.pop(), sft.position_weights)
        for name, term, output in zip(batch.teachers, distillation, outputs, strict=True):
            measured.add(output, term.position_weights, self._teacher_weights[name])
            loss = measured.teachers.setdefault(name, LossMeasurements())
            loss.add(output, batch.teachers[name].importance)
            loss.per_example |= token_losses(output, batch.teachers[name], batch)
        total.backward()
        measured.total += float(total.detach())

    def _terms(self, batch: MicroBatch, tokens: int) -> list[LossTerm]:
        """Return cross entropy on the reference answers, every teacher's loss, then the reward
        term if the micro-batch has one."""
        device = self._student.device
        labels = batch.labels.to(device)
        token_weights = batch.slot_weights.to(device) / tokens
        distillation = [
            LossTerm(
                self._losses[name],
                self._losses[name].targets(part.comparisons, part.slot_offsets).to(device),
                part.slot_weights.to(device) * (self._teacher_weights[name] / tokens),
            )
            for name, part in batch.teachers.items()
        ]
        mixed = mixed_terms(
            LossTerm(SftLoss(), label_targets(labels), token_weights),
            distillation,
            distill_weights=torch.where(labels == IGNORED, 1.0, self._config.distill_loss_weight),
        )
        if batch.rewards is None:
            return mixed
        weights = batch.rewards.slot_weights.to(device) / tokens
        targets = batch.rewards.targets.to(device)
        return [*mixed, LossTerm(self._reward_loss, targets, weights)]
