"""CTKD: cross-tokenizer distillation from a teacher's top-k through a projection matrix.

The student's next-token distribution is projected on the teacher's vocabulary and compared with
the teacher's truncated one at the start of every aligned span; whatever either side has outside
the ids that both can name is one tail bucket. With the identity for a projection, this *is* the
same-vocabulary top-k KL. (X-Token's P-KL, arXiv 2605.21699, on first rows and with a tail bucket
in place of renormalisation.) ``topk_divergence`` has the other divergences and truncations.
"""

from mopd_losses.config import Divergence, TopKDivergenceSettings
from mopd_losses.core.loss_output import LossOutput
from mopd_losses.core.student_rows import StudentLogprobs
from mopd_losses.projection.cache import DeviceProjection
from mopd_losses.topk.topk_divergence import topk_divergence
from mopd_losses.topk.topk_targets import TopKTargets


def ctkd(
    student: StudentLogprobs,
    targets: TopKTargets,
    projection: DeviceProjection,
    *,
    divergence: Divergence = "forward_kl",
    temperature: float = 1.0,
) -> LossOutput:
    """``topk_divergence`` with a tail bucket and a divergence's usual parameter.

    Args:
        targets: the teacher at the start of each span, at the same ``temperature``.
        projection: student ids -> teacher ids, on the student's device.
        temperature: softmax temperature of both sides.

    Raises:
        DataError: when the student's width is not the projection's.
    """
    return topk_divergence(
        student,
        targets,
        projection,
        TopKDivergenceSettings(divergence=divergence),
        teacher_temperature=temperature,
    )
