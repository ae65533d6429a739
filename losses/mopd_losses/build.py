"""The table from a loss's settings to the loss: the one place that knows all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel

from mopd_losses.config import CtkdConfig, LossConfig, TopKKlConfig
from mopd_losses.loss import Loss
from mopd_losses.projection import ProjectionMatrix, identity_projection
from mopd_losses.projection_cache import DeviceProjection, ProjectionCache
from mopd_losses.topk_divergence import TopKDivergenceLoss
from mopd_protocol.errors import ConfigError
from mopd_protocol.token_table import TextEncoder, TokenTable


@dataclass(frozen=True, eq=False)
class Vocabularies:
    """The two sides that a loss compares."""

    student: TokenTable
    student_width: int  # rows of the student's head
    teacher: TokenTable
    teacher_encoder: TextEncoder


@dataclass(frozen=True, eq=False)
class LossSetting:
    """What a loss is built from besides its own settings."""

    vocabularies: Vocabularies
    projection: DeviceProjection
    teacher_temperature: float  # that the teacher scores at


def projection_for(
    config: LossConfig, vocabularies: Vocabularies, cache: ProjectionCache
) -> ProjectionMatrix:
    """The projection that this loss compares through.

    Raises:
        ConfigError: when a same-vocabulary loss is asked for two different tokenizers.
    """
    student, teacher = vocabularies.student, vocabularies.teacher
    if isinstance(config, TopKKlConfig):
        if student.fingerprint != teacher.fingerprint:
            raise ConfigError(
                f"loss 'topk_kl' needs one tokenizer on both sides, but the student has "
                f"{student.fingerprint[:12]} and the teacher {teacher.fingerprint[:12]}; use 'ctkd'"
            )
        return identity_projection(student, logit_width=vocabularies.student_width)
    return cache.matrix(
        student,
        teacher,
        vocabularies.teacher_encoder,
        student_width=vocabularies.student_width,
        settings=config.projection,
    )


def build_loss(
    config: LossConfig,
    projection: ProjectionMatrix,
    vocabularies: Vocabularies,
    *,
    cache: ProjectionCache,
    device: torch.device,
    temperature: float = 1.0,
) -> Loss:
    """The loss, bound to its projection's copy on ``device``.

    Args:
        temperature: that the teacher scores at.

    Raises:
        ConfigError: when the loss cannot be had from a teacher that scores at that temperature.
    """
    setting = LossSetting(vocabularies, cache.on(device, projection), temperature)
    return _BUILDERS[type(config)](config, setting)


def _topk_divergence(config: CtkdConfig | TopKKlConfig, setting: LossSetting) -> Loss:
    return TopKDivergenceLoss(setting.projection, config, setting.teacher_temperature)


_BUILDERS: dict[type[BaseModel], Callable[[Any, LossSetting], Loss]] = {
    CtkdConfig: _topk_divergence,
    TopKKlConfig: _topk_divergence,
}
