"""``TrueTranslator``: a translation that takes the truth from the model of the texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_losses.translation.translation import Coverage, ExtraRow, Translation
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.reference.translation import Known, SharedTexts


@dataclass(frozen=True, eq=False)
class TrueTranslator:
    """Translates one model's scores by its truth."""

    shared: SharedTexts
    names: int = 8  # entries a row

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> "TruePending":
        """Name the likeliest student tokens of each row."""
        return TruePending([self._translated(completion) for completion in completions])

    def _translated(self, completion: TokenSequence) -> Translation:
        rows = self.shared.truth(completion)
        logprobs, ids = rows.topk(self.names, dim=1)
        ids = ids.masked_fill(logprobs.isneginf(), -1)
        tail = rows.scatter(1, ids.clamp_min(0), -np.inf).logsumexp(dim=1)
        realised = rows[np.arange(len(rows)), completion.token_ids.tolist()]
        columns = ids.numpy(), logprobs.numpy(), realised.numpy(), tail.numpy()
        mass = logprobs.exp().sum(dim=1).numpy().astype(np.float32)
        lost = np.zeros(len(rows), dtype=np.bool_)
        return Translation(TopKLogprobs(*columns), Coverage(mass, lost, ~lost))


class TruePending:
    """The truth, once a row of each completion that its score has was requested."""

    def __init__(self, translations: Sequence[Translation]) -> None:
        self._translations = translations
        self.extra_rows = [ExtraRow(number, 0, ()) for number in range(len(translations))]

    def add(self, rows: Known) -> None:
        self.extra_rows = [row for row in self.extra_rows if row not in rows]

    def translations(self) -> list[Translation]:
        return [*self._translations]
