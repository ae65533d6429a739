"""Compare two scores of one completion: both are parts of one distribution per row.

For temperatures that differ by a factor ``s``, ``log p_s(i) = s log p(i) - log Z`` with ``Z`` the
sum of ``p^s``. The known ids and the tail bound ``Z`` from both sides.
"""

from dataclasses import dataclass

import numpy as np

from mopd_protocol.samples import TeacherScore

#: Largest difference in nats from rounding for entries near zero, by the precision of the model;
#: a tenth more per nat of the entry. Batches of other shapes changed rows of random models of 2 to
#: 24 layers, whose log-probabilities reach -100, by at most 1.7e-4 (float32), 0.23 (float16) and
#: 1.7 (bfloat16: the spacing of logits from 64 to 128 is 0.5). float32 may use TF32 kernels.
_TOLERANCES = {"float32": 1e-2, "float16": 0.2, "bfloat16": 1.0}
#: The mean over at least so many rows has to be smaller than the largest difference.
_MEAN_ROWS, _MEAN_SHARE = 8, 0.25
#: Lowest finite entry in float16, in which a response may be encoded.
_LOWEST = float(np.finfo(np.float16).min)


@dataclass(frozen=True)
class KnownRow:
    """The part of one row's distribution that a score contains, in nats."""

    entries: dict[int, float]
    token: tuple[int, float]
    tail: float
    """Log of the probability outside the entries, or 0 if it is not exact."""
    rest: float
    """Upper bound of an id outside the entries."""

    @classmethod
    def of(
        cls,
        score: TeacherScore,
        row: int,
        candidates: list[int] | None,
        *,
        exact_tails: bool,
    ) -> "KnownRow":
        """Extract a row; ``candidates`` are the requested ids, None for the top-k."""
        topk = score.topk
        present = topk.ids[row] >= 0
        values = np.maximum(topk.logprobs[row][present], _LOWEST).tolist()
        entries = dict(zip(topk.ids[row][present].tolist(), values, strict=True))
        tail = max(float(topk.tail_logprobs[row]), _LOWEST) if exact_tails else 0.0
        if candidates is None:
            rest = min([tail, *values])
        else:
            # A missing candidate has no probability.
            entries, rest = dict.fromkeys(candidates, _LOWEST) | entries, tail
        token = int(score.token_ids[row]), max(float(score.logprobs[row]), _LOWEST)
        return cls(entries, token, tail, rest)

    @property
    def known(self) -> dict[int, float]:
        """Log-probability by id."""
        return self.entries | dict([self.token])


@dataclass(frozen=True)
class Disagreement:
    """A value of a second score that the first one excludes."""

    row: int
    subject: str
    second: float
    expected: float
    tolerance: float


@dataclass
class Agreement:
    """Comparison of the rows of two scores.

    Args:
        dtype: precision of the model; the largest tolerance if it is unknown.
        temperature: of the first score.
        factor: temperature of the first score divided by that of the second.
    """

    dtype: str
    temperature: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        nats = _TOLERANCES.get(self.dtype, max(_TOLERANCES.values()))
        self._nats = nats * self.factor * max(1.0, 1 / self.temperature)
        self._excesses: list[float] = []
        self._tolerances: list[float] = []
        self._rows = 0

    def disagreement(self, row: int, first: KnownRow, second: KnownRow) -> Disagreement | None:
        """Return the first contradiction of a row, or that of the mean of all rows so far."""
        self._rows += 1
        lowest, highest = self._log_normalizer(first)
        before, after = first.known, second.known
        shifts: dict[int, float] = {}
        for token_id in before | after:
            name = f"token id {token_id}"
            if token_id not in before:
                limit = self.factor * first.rest - lowest
                outcome = self._outside(row, name, after[token_id], -np.inf, limit)
            elif token_id not in after:
                least = self.factor * before[token_id] - highest
                outcome = self._outside(row, name, second.rest, least, np.inf)
            else:
                value = self.factor * before[token_id]
                shifts[token_id] = after[token_id] - value
                outcome = self._outside(
                    row, name, after[token_id], value - highest, value - lowest, is_common=True
                )
            if outcome is not None:
                return outcome
        extra = [value for key, value in second.entries.items() if key not in first.entries]
        if extra:
            limit = first.tail + (self.factor - 1) * first.rest - lowest
            mass = float(np.logaddexp.reduce(extra))
            if outcome := self._outside(row, "the probability of the tail", mass, -np.inf, limit):
                return outcome
        return self._uneven(row, before, shifts) or self._mean(row)

    def _log_normalizer(self, row: KnownRow) -> tuple[float, float]:
        """Return the lowest and highest log of the sum of all powers of a row."""
        if self.factor == 1.0:
            return 0.0, 0.0
        lowest = float(np.logaddexp.reduce([self.factor * v for v in row.known.values()]))
        # No id of the tail is more likely than ``rest``.
        return lowest, float(np.logaddexp(lowest, row.tail + (self.factor - 1) * row.rest))

    def _outside(
        self,
        row: int,
        subject: str,
        second: float,
        lowest: float,
        highest: float,
        *,
        is_common: bool = False,
    ) -> Disagreement | None:
        """Compare a value with an interval."""
        expected = min(max(second, lowest), highest)
        excess = abs(second - expected)
        tolerance = self._tolerance(second, expected)
        if is_common:
            self._excesses.append(excess)
            self._tolerances.append(tolerance)
        return (
            None if excess <= tolerance else Disagreement(row, subject, second, expected, tolerance)
        )

    def _uneven(
        self, row: int, before: dict[int, float], shifts: dict[int, float]
    ) -> Disagreement | None:
        """Compare the differences between ids, which do not depend on the normalization."""
        if self.factor == 1.0 or not shifts:
            return None
        middle = float(np.median([*shifts.values()]))
        for token_id, shift in shifts.items():
            value = self.factor * before[token_id]
            expected = value + middle
            outcome = self._outside(row, f"token id {token_id}", value + shift, expected, expected)
            if outcome is not None:
                return outcome
        return None

    def _mean(self, row: int) -> Disagreement | None:
        if self._rows < _MEAN_ROWS:
            return None
        mean, limit = np.mean(self._excesses), _MEAN_SHARE * np.mean(self._tolerances)
        if mean <= limit:
            return None
        return Disagreement(row, "the mean difference", float(mean), 0.0, float(limit))

    def _tolerance(self, second: float, expected: float) -> float:
        return self._nats * (1 + max(abs(second), abs(expected)) / 10)
