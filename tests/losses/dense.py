"""CTKD on a full matrix of logits under autograd: the form that most tests ask it in."""

from torch import Tensor

from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.topk import ctkd as ctkd_module
from mopd_losses.topk.ctkd import Divergence
from mopd_losses.topk.topk_targets import TopKTargets


def ctkd(
    logits: Tensor,
    targets: TopKTargets,
    projection: DeviceProjection,
    *,
    divergence: Divergence = "forward_kl",
    temperature: float = 1.0,
) -> LossOutput:
    """[tokens, student width] logits -> the loss."""
    return ctkd_module.ctkd(
        DenseRows(logits, projection.real_ids),
        targets,
        projection,
        divergence=divergence,
        temperature=temperature,
    )
