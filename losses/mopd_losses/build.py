"""Build a loss from its settings: the table of all losses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import BaseModel

from mopd_losses.config import (
    AlmConfig,
    CtkdConfig,
    GoldConfig,
    K2Config,
    K3Config,
    LossConfig,
    PolicyGradientConfig,
    PrefixKlConfig,
    SimctConfig,
    TopKKlConfig,
    UldConfig,
)
from mopd_losses.core.loss import Loss
from mopd_losses.core.valid_text import ValidTextLoss
from mopd_losses.ends.end_event import EndEvent
from mopd_losses.ends.one_end_loss import OneEndLoss
from mopd_losses.prefix.loss import PrefixKlLoss
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.preparation import Preparation
from mopd_losses.projection.cache import DeviceProjection, ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_losses.projection.sides import StudentSide, TokenizerSide, find_projection, resolve_loss
from mopd_losses.projection.vocabulary_match import VocabularyMatch, exact_match
from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from mopd_losses.spans.alm import AlmLoss
from mopd_losses.spans.gold import GoldLoss, adaptive_weights
from mopd_losses.spans.simct import SimctLoss
from mopd_losses.spans.uld import UldLoss
from mopd_losses.topk.ctkd import CtkdLoss
from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss
from mopd_losses.topk.teacher_events import TeacherEvents, first_student_tokens
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_protocol.errors import ConfigError

#: Compare equal ids of both sides, or none, where these have one tokenizer.
_ONE_VOCABULARY = (TopKKlConfig, PolicyGradientConfig, K2Config, K3Config)


@dataclass(frozen=True, eq=False)
class LossContext:
    """Everything but its settings that a loss is built from."""

    config: LossConfig
    student: StudentSide
    teacher: TokenizerSide
    device: torch.device
    cache: ProjectionCache
    teacher_temperature: float

    @cached_property
    def matrix(self) -> ProjectionMatrix:
        """The projection of the two vocabularies; most losses read none, so it is found lazily."""
        return find_projection(self.config, self.student, self.teacher, self.cache)

    @property
    def projection(self) -> DeviceProjection:
        """The copy of ``matrix`` on ``device``."""
        return self.cache.on(self.device, self.matrix)

    @property
    def has_one_tokenizer(self) -> bool:
        """True if the teacher has the student's own tokenizer."""
        return self.student.table.fingerprint == self.teacher.table.fingerprint

    @property
    def ends(self) -> EndEvent | None:
        """The end of a turn; of prefix KL, whose cells are text, it is one event in any case."""
        one_vocabulary = self.has_one_tokenizer and isinstance(self.config, _ONE_VOCABULARY)
        return EndEvent.between(
            self.student.table, self.teacher.table, one_vocabulary=one_vocabulary
        )

    def require_temperature_one(self) -> None:
        """Raise ConfigError for a teacher that scores at another temperature."""
        if self.teacher_temperature != 1.0:
            raise ConfigError(
                f"loss {self.config.type!r}: text likelihoods need teacher temperature 1 (found "
                f"{self.teacher_temperature:g}, expected 1). Remove the teacher's temperature.",
                key="temperature",
            )

    def exact_match(self) -> VocabularyMatch:
        """Return the ids of both sides that spell the same bytes."""
        match = exact_match(self.matrix, self.student.table, self.teacher.table)
        return match.to(self.device)


def build_loss(
    config: LossConfig,
    student: StudentSide,
    teacher: TokenizerSide,
    device: torch.device | str = "cpu",
    *,
    cache: ProjectionCache | None = None,
    temperature: float = 1.0,
) -> Loss:
    """Build the loss of a student and one teacher.

    Args:
        student: the student's tokenizer and logit width, e.g. a ``StudentIdentity``.
        teacher: the teacher's tokenizer, e.g. what ``TeacherClient.tokenizer()`` returns.
        cache: projections that several losses or runs share, and a folder for the tables of
            prefix KL; by default built in memory.
        temperature: the softmax temperature of the teacher's scores.

    Raises:
        ConfigError: if the loss does not support these tokenizers or this temperature.
    """
    config = resolve_loss(config, student, teacher)
    context = LossContext(
        config, student, teacher, torch.device(device), cache or ProjectionCache(), temperature
    )
    loss = _BUILDERS[type(config)](config, context)
    if context.ends is not None and not isinstance(config, PrefixKlConfig):
        loss = OneEndLoss(loss, context.ends)
    return loss if context.has_one_tokenizer else ValidTextLoss(loss)


def _topk_divergence(config: CtkdConfig | TopKKlConfig, context: LossContext) -> Loss:
    projection, temperature = context.projection, context.teacher_temperature
    if isinstance(config, CtkdConfig) and config.span_rows == "pooled":
        return PooledCtkdLoss(projection, config, temperature)
    loss = TopKDivergenceLoss(projection, config, temperature)
    if isinstance(config, TopKKlConfig):
        return loss
    first_tokens = first_student_tokens(context.teacher.table, context.student)
    return CtkdLoss(loss, TeacherEvents.of(projection, first_tokens))


def _prefix_kl(config: PrefixKlConfig, context: LossContext) -> Loss:
    student, teacher = context.student, context.teacher
    pair = TokenizerPair(
        student.table, student.encoder, teacher.table, teacher.encoder, context.cache.folder
    )
    return PrefixKlLoss(Preparation(pair), config, context.teacher_temperature)


def _policy_gradient(config: PolicyGradientConfig, context: LossContext) -> Loss:
    context.require_temperature_one()
    has_baseline = config.baseline != "none"
    if has_baseline and not context.has_one_tokenizer:
        raise ConfigError(
            f"baseline {config.baseline!r}: the teacher's top-k is of another tokenizer, in which "
            "the expected advantage is unknown. Remove the baseline, or use 'prefix_kl'.",
            key="loss.baseline",
        )
    return PolicyGradientLoss(config.max_ratio, has_baseline, config.skew)


def _k2(config: K2Config, context: LossContext) -> Loss:
    context.require_temperature_one()
    return K2Loss()


def _k3(config: K3Config, context: LossContext) -> Loss:
    context.require_temperature_one()
    return K3Loss()


def _gold(config: GoldConfig, context: LossContext) -> Loss:
    context.require_temperature_one()
    match = context.exact_match()
    if config.matched_weight is None or config.unmatched_weight is None:
        matched, unmatched = adaptive_weights(match)
    else:
        matched, unmatched = config.matched_weight, config.unmatched_weight
    return GoldLoss(match, matched, unmatched, beta=config.beta, merge=config.merge)


def _uld(config: UldConfig, context: LossContext) -> Loss:
    context.require_temperature_one()
    return UldLoss(context.projection.real_ids, config.merge)


def _alm(config: AlmConfig, context: LossContext) -> Loss:
    context.require_temperature_one()
    return AlmLoss(config.divergence, config.tau)


def _simct(config: SimctConfig, context: LossContext) -> Loss:
    context.require_temperature_one()
    return SimctLoss(context.exact_match(), config.divergence)


_BUILDERS: dict[type[BaseModel], Callable[[Any, LossContext], Loss]] = {
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
}
