"""``TopKLogprobs``: a truncated next-token distribution for each token of a completion."""

from dataclasses import dataclass

import numpy as np

from mopd_protocol.arrays import FloatArray, IntArray, frozen_array
from mopd_protocol.errors import DataError

#: Retained probabilities may add up to this much more than one (rounding, float16 on the wire).
MASS_TOLERANCE = 2e-2

ABSENT_ID = -1


@dataclass(frozen=True, eq=False)
class TopKLogprobs:
    """Row ``r`` is the distribution that predicts completion token ``r``, given all before it.

    The shift between a model's output positions and the tokens that they predict is applied once,
    by the engines; everywhere else row ``r`` belongs to token ``r``. Natural logarithms, most
    likely first. A missing entry is id ``-1`` with ``-inf``.

    Raises:
        DataError: on disagreeing shapes, unsorted rows, a logprob above zero or NaN, a missing
            id with a probability (or the reverse), an id twice in a row, or mass above one.
    """

    ids: IntArray  # [rows, k]
    logprobs: FloatArray  # [rows, k], nats
    token_logprobs: FloatArray  # [rows], nats: of the completion's token
    tail_logprobs: FloatArray  # [rows], nats: log of the mass outside the k entries
    # [rows], 1 + number of likelier ids than the completion's token; None where not computed, and
    # in responses
    token_ranks: IntArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozen_array(self.ids, "int32"))
        for name in ("logprobs", "token_logprobs", "tail_logprobs"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), "float32"))
        if self.token_ranks is not None:
            object.__setattr__(self, "token_ranks", frozen_array(self.token_ranks, "int32"))
        self._check_shapes()
        self._check_values()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """Entries per row, including missing ones."""
        return self.ids.shape[1]

    def rows(self, start: int, stop: int) -> "TopKLogprobs":
        """Return the rows ``[start, stop)``."""
        part = slice(start, stop)
        return TopKLogprobs(
            self.ids[part],
            self.logprobs[part],
            self.token_logprobs[part],
            self.tail_logprobs[part],
            None if self.token_ranks is None else self.token_ranks[part],
        )

    def _check_shapes(self) -> None:
        rows = self.ids.shape[:1]
        if self.ids.ndim != 2 or self.logprobs.shape != self.ids.shape:
            raise DataError(
                f"top-k ids of shape {self.ids.shape} and logprobs of shape "
                f"{self.logprobs.shape}: expected one shape [rows, k]",
                key="topk_ids",
            )
        ranks = () if self.token_ranks is None else ("token_ranks",)
        for name in ("token_logprobs", "tail_logprobs", *ranks):
            if getattr(self, name).shape != rows:
                raise DataError(
                    f"{name} has shape {getattr(self, name).shape}, expected {rows}: one a row",
                    key=name,
                )

    def _check_values(self) -> None:
        names = {"topk_logprobs": self.logprobs, "token_logprobs": self.token_logprobs}
        for name, values in (names | {"tail_logprobs": self.tail_logprobs}).items():
            if np.isnan(values).any() or (values > 1e-3).any():
                row = int(np.argwhere(np.isnan(values) | (values > 1e-3))[0][0])
                raise DataError(
                    f"{name} of row {row}: NaN or a value above 0. Expected natural logarithms.",
                    key=name,
                )
        missing = self.ids < 0
        if (missing != np.isneginf(self.logprobs)).any() or (self.ids < ABSENT_ID).any():
            row = int(np.argwhere((missing != np.isneginf(self.logprobs)) | (self.ids < -1))[0][0])
            raise DataError(
                f"top-k ids of row {row}: id -1 and logprob -inf do not coincide. "
                "Expected -1 exactly where the logprob is -inf.",
                key="topk_ids",
            )
        with np.errstate(invalid="ignore"):  # -inf minus -inf between two missing entries
            if (np.diff(self.logprobs, axis=1) > 0).any():
                raise DataError(
                    "top-k logprobs are not sorted; expected the most likely first",
                    key="topk_logprobs",
                )
        ordered = np.sort(self.ids, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
            raise DataError("top-k ids: a token id occurs twice in one row", key="topk_ids")
        mass = np.exp(self.logprobs.astype(np.float64)).sum(axis=1)
        if (mass > 1 + MASS_TOLERANCE).any():
            row = int(mass.argmax())
            raise DataError(
                f"top-k logprobs of row {row}: probability mass above 1 (found {mass[row]:.4f})",
                key="mass",
            )
