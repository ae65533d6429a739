"""Alignment, projection between vocabularies, and the losses between student and teacher."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_losses.alignment.byte_alignment import Alignment, align
    from mopd_losses.build import build_loss
    from mopd_losses.config import (
        AlmConfig,
        AutoConfig,
        CtkdConfig,
        GoldConfig,
        K2Config,
        K3Config,
        LossConfig,
        PolicyGradientConfig,
        PrefixKlConfig,
        ProjectionSettings,
        SimctConfig,
        TopKKlConfig,
        UldConfig,
        described,
    )
    from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head
    from mopd_losses.core.cross_entropy import SftLoss, label_targets
    from mopd_losses.core.loss import AlignedPair, Loss, LossOutput
    from mopd_losses.core.student_rows import DenseRows
    from mopd_losses.prefix.loss import PrefixKlLoss
    from mopd_losses.projection.cache import DeviceProjection, ProjectionCache
    from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
    from mopd_losses.sampled.k2_k3 import K2Loss, K3Loss
    from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
    from mopd_losses.spans.alm import AlmLoss
    from mopd_losses.spans.gold import GoldLoss
    from mopd_losses.spans.simct import SimctLoss
    from mopd_losses.spans.uld import UldLoss
    from mopd_losses.topk.full_vocabulary import FullVocabularyLoss
    from mopd_losses.topk.pooled_ctkd import PooledCtkdLoss
    from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
    from mopd_losses.topk.topk_targets import TopKTargets
    from mopd_losses.translation.translation import Coverage, ExtraRow, Translation
    from mopd_losses.translation.translator import Translator
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "AlignedPair",
    "Alignment",
    "AlmConfig",
    "AlmLoss",
    "AutoConfig",
    "Coverage",
    "CtkdConfig",
    "DenseRows",
    "DeviceProjection",
    "ExtraRow",
    "FullVocabularyLoss",
    "GoldConfig",
    "GoldLoss",
    "Head",
    "K2Config",
    "K2Loss",
    "K3Config",
    "K3Loss",
    "Loss",
    "LossConfig",
    "LossOutput",
    "LossTerm",
    "PolicyGradientConfig",
    "PolicyGradientLoss",
    "PooledCtkdLoss",
    "PrefixKlConfig",
    "PrefixKlLoss",
    "ProjectionCache",
    "ProjectionMatrix",
    "ProjectionSettings",
    "SftLoss",
    "SimctConfig",
    "SimctLoss",
    "TopKDivergenceLoss",
    "TopKKlConfig",
    "TopKTargets",
    "Translation",
    "Translator",
    "UldConfig",
    "UldLoss",
    "align",
    "blockwise_head",
    "build_loss",
    "build_projection",
    "described",
    "label_targets",
]
