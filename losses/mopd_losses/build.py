"""The table from a loss's settings to the loss: the one place that knows all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel

from mopd_losses.config import (
    AlmConfig,
    CtkdConfig,
    GoldConfig,
    HklConfig,
    K2Config,
    K3Config,
    LossConfig,
    PklParityConfig,
    PolicyGradientConfig,
    PrefixKlConfig,
    SimctConfig,
    TopKKlConfig,
    UldConfig,
)
from mopd_losses.core.loss import Loss
from mopd_losses.prefix.loss import PrefixKlLoss
from mopd_losses.prefix.shared_units import SharedUnits
from mopd_losses.projection.cache import DeviceProjection, ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix, identity_projection
from mopd_losses.projection.vocabulary_match import VocabularyMatch, exact_match, weighted_match
from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from mopd_losses.spans.alm import AlmLoss
from mopd_losses.spans.gold import GoldLoss, adaptive_weights
from mopd_losses.spans.simct import SimctLoss
from mopd_losses.spans.uld import UldLoss
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.xtoken.hkl import HklLoss, xtoken_form
from mopd_losses.xtoken.pkl_parity import PklParityLoss
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


@dataclass(frozen=True, eq=False)
class Vocabularies:
    """The two sides that a loss compares."""

    student: TokenTable
    student_width: int  # rows of the student's head
    teacher: TokenTable
    teacher_encoder: TextEncoder
    #: Made when it is asked for: seconds for a large vocabulary, and few losses read it.
    student_encoder: Callable[[], TextEncoder]


@dataclass(frozen=True, eq=False)
class LossSetting:
    """What a loss is built from besides its own settings."""

    vocabularies: Vocabularies
    matrix: ProjectionMatrix
    cache: ProjectionCache
    device: torch.device
    teacher_temperature: float  # that the teacher scores at

    @property
    def projection(self) -> DeviceProjection:
        """The matrix's copy on ``device``, which is made when the first loss asks for it."""
        return self.cache.on(self.device, self.matrix)

    def require_temperature_one(self, loss: str) -> None:
        """Raises ConfigError for a teacher that scores at another temperature."""
        if self.teacher_temperature != 1.0:
            raise ConfigError(
                f"loss {loss!r} is about likelihoods of text, so its teacher must score at "
                f"temperature 1, not {self.teacher_temperature:g}; remove the teacher's temperature"
            )

    def exact_match(self) -> VocabularyMatch:
        """Ids of both sides that spell the same bytes."""
        sides = self.vocabularies
        return exact_match(self.matrix, sides.student, sides.teacher).to(self.device)


def projection_for(
    config: LossConfig, vocabularies: Vocabularies, cache: ProjectionCache
) -> ProjectionMatrix:
    """The projection that this loss compares through, or that tells how far it reaches.

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
        settings=config.projection if isinstance(config, _PROJECTED) else None,
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
    """The loss, bound to its projection's copy on ``device`` where it reads one.

    Args:
        temperature: that the teacher scores at.

    Raises:
        ConfigError: when the loss cannot be had from a teacher that scores at that temperature.
    """
    setting = LossSetting(vocabularies, projection, cache, device, temperature)
    return _BUILDERS[type(config)](config, setting)


def _topk_divergence(config: CtkdConfig | TopKKlConfig, setting: LossSetting) -> Loss:
    if isinstance(config, CtkdConfig) and config.span_rows == "pooled":
        return PooledCtkdLoss(setting.projection, config, setting.teacher_temperature)
    return TopKDivergenceLoss(setting.projection, config, setting.teacher_temperature)


def _prefix_kl(config: PrefixKlConfig, setting: LossSetting) -> Loss:
    sides = setting.vocabularies
    units = SharedUnits(
        sides.student, sides.student_encoder(), sides.teacher, sides.teacher_encoder
    )
    return PrefixKlLoss(units, config, setting.teacher_temperature)


def _policy_gradient(config: PolicyGradientConfig, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return PolicyGradientLoss(config.max_ratio)


def _k2(config: K2Config, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return K2Loss()


def _k3(config: K3Config, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return K3Loss()


def _gold(config: GoldConfig, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    match = setting.exact_match()
    if config.matched_weight is None or config.unmatched_weight is None:
        matched, unmatched = adaptive_weights(match)
    else:
        matched, unmatched = config.matched_weight, config.unmatched_weight
    return GoldLoss(match, matched, unmatched, beta=config.beta, merge=config.merge)


def _uld(config: UldConfig, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return UldLoss(setting.projection.real_ids, config.merge)


def _alm(config: AlmConfig, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return AlmLoss(config.divergence, config.tau)


def _simct(config: SimctConfig, setting: LossSetting) -> Loss:
    setting.require_temperature_one(config.type)
    return SimctLoss(setting.exact_match(), config.divergence)


def _pkl_parity(config: PklParityConfig, setting: LossSetting) -> Loss:
    return PklParityLoss(
        setting.projection, config.divergence, setting.teacher_temperature, config.most_ids
    )


def _hkl(config: HklConfig, setting: LossSetting) -> Loss:
    match = weighted_match(setting.matrix, config.least_weight)
    if config.loss_type == "auto" and xtoken_form(match, config.least_coverage) == "pkl_parity":
        return PklParityLoss(setting.projection, config.divergence, setting.teacher_temperature)
    return HklLoss(
        match.to(setting.device),
        config.divergence,
        config.generalised,
        setting.teacher_temperature,
        config.most_ranks,
    )


#: Losses whose settings say how their projection is built.
_PROJECTED = (CtkdConfig, PklParityConfig, HklConfig)

_BUILDERS: dict[type[BaseModel], Callable[[Any, LossSetting], Loss]] = {
    CtkdConfig: _topk_divergence,
    TopKKlConfig: _topk_divergence,
    PrefixKlConfig: _prefix_kl,
    PolicyGradientConfig: _policy_gradient,
    K2Config: _k2,
    K3Config: _k3,
    GoldConfig: _gold,
    UldConfig: _uld,
    AlmConfig: _alm,
    SimctConfig: _simct,
    PklParityConfig: _pkl_parity,
    HklConfig: _hkl,
}
