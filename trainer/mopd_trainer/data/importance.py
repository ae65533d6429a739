"""Importance weights: a sampled token weighs less behind text that its teacher finds implausible.

Behind a wrong token a teacher corrects text that it would never generate. Most samples of a weak
student are such text, and most of its gradient may be noise for correct completions.

With q the distribution that was sampled from and p the teacher's at the same temperature, a token
``i`` has the weight

    max(least, min(1, exp(r(i)))),    r(0) = 0,    r(i + 1) = discount * r(i) + log p(i) - log q(i)

With ``discount`` 1 and ``least`` 0 that is the truncated importance ratio of the text before the
token, and the step's loss an average over what student and teacher both would write
(arXiv 2606.22600). A smaller discount forgets: behind a long completion every ratio is small, as
many small differences add up.

Ratios are known where both tokenizations have a token end, so that the log-ratio of a span counts
with its last token, and text that the teacher's tokenizer changed does not count. The teacher's
probability is that of the text, in any of its tokens (``text_masses``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.samples import Rollout
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.settings import ImportanceConfig
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.data.text_masses import text_masses


@dataclass(frozen=True)
class ImportanceWeights:
    """Computes the weights of sampled tokens."""

    config: ImportanceConfig
    temperature: float
    """Sampling temperature. Greedy samples, whose probability is 1, are compared with the teacher's
    distribution as it is."""
    tables: Mapping[str, TokenTable]
    """Teacher name -> its tokens."""

    def of(self, rollout: Rollout, scored: AlignedScore) -> NDArray[np.float32]:
        """Return the weight of each token of a completion for one teacher: [tokens], from ``least``
        to 1; 1 for reference completions, which were not sampled."""
        weights = np.ones(len(rollout.completion), dtype=np.float32)
        least = self.config.least_weight
        if rollout.sampled_logprobs is None or least == 1:
            return weights
        spans = scored.alignment
        masses, at_ends = text_masses(
            scored.score, self.tables[scored.teacher], spans.teacher_ends, self.temperature or 1.0
        )
        masses[spans.teacher_ends] = at_ends
        student = np.concatenate([[0.0], np.cumsum(rollout.sampled_logprobs.astype(np.float64))])
        ratios = np.zeros(len(weights))  # of what ends with each token
        ratios[spans.student_ends - 1] = (
            masses[spans.teacher_ends]
            - masses[spans.teacher_starts]
            - student[spans.student_ends]
            + student[spans.student_starts]
        )
        before, discount = 0.0, self.config.discount
        for index, ratio in enumerate(ratios.tolist()):
            weights[index] = np.exp(min(before, 0.0))
            before = discount * before + ratio
        return np.maximum(weights, least, dtype=np.float32)
