"""The table from a loss's settings to the loss: the one place that knows all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mopd_losses.config import CtkdConfig, TopKKlConfig
from mopd_losses.ctkd import ctkd
from mopd_losses.loss_output import LossOutput
from mopd_losses.projection import ProjectionMatrix, identity_projection
from mopd_losses.projection_cache import ProjectionCache
from mopd_losses.student_rows import DenseRows
from mopd_losses.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError
from mopd_protocol.token_table import TextEncoder, TokenTable

#: (logits [tokens, student width], targets) -> nats per token.
Loss = Callable[[torch.Tensor, TopKTargets], LossOutput]


@dataclass(frozen=True, eq=False)
class Vocabularies:
    """The two sides that a loss compares."""

    student: TokenTable
    student_width: int  # rows of the student's head
    teacher: TokenTable
    teacher_encoder: TextEncoder


def projection_for(
    config: CtkdConfig | TopKKlConfig, vocabularies: Vocabularies, cache: ProjectionCache
) -> ProjectionMatrix:
    """The projection that this loss compares through.

    Raises:
        ConfigError: when a same-vocabulary loss is asked for two different tokenizers.
    """
    student, teacher = vocabularies.student, vocabularies.teacher
    if isinstance(config, CtkdConfig):
        return cache.matrix(
            student,
            teacher,
            vocabularies.teacher_encoder,
            student_width=vocabularies.student_width,
            settings=config.projection,
        )
    if student.fingerprint != teacher.fingerprint:
        raise ConfigError(
            f"loss 'topk_kl' needs one tokenizer on both sides, but the student has "
            f"{student.fingerprint[:12]} and the teacher {teacher.fingerprint[:12]}; use 'ctkd'"
        )
    return identity_projection(student, logit_width=vocabularies.student_width)


def build_loss(
    config: CtkdConfig | TopKKlConfig,
    projection: ProjectionMatrix,
    *,
    cache: ProjectionCache,
    device: torch.device,
    temperature: float = 1.0,
) -> Loss:
    """The loss, bound to its projection's copy on ``device``."""
    on_device = cache.on(device, projection)

    def loss(logits: torch.Tensor, targets: TopKTargets) -> LossOutput:
        return ctkd(
            DenseRows(logits, on_device.real_ids),
            targets,
            on_device,
            divergence=config.divergence,
            temperature=temperature,
        )

    return loss
