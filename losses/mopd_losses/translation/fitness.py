"""``Fitness``: the share of a teacher's tokens that the student's vocabulary has as one token."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

Verdict = Literal["fit", "partly fit", "unfit"]

#: Name -> text in which the teacher's tokens are counted.
SAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "English": "The committee decided on Thursday that the old bridge would stay open, because "
        "it was not clear how the farmers on the other side should reach the market. A small "
        "koala watched them from a tree and carried a purple umbrella.",
        "code": "def mean(values: list[float]) -> float:\n    if not values:\n        raise "
        'ValueError("no values")\n    return sum(values) / len(values)\n',
        "numbers": "On 2024-03-17 the total was 1,284.50 for 36 items: 12 * 3 = 36, 7 + 95 = 102.",
        "German": "Viele Verkehrsverbindungen zwischen den Nachbargemeinden wurden überraschend "
        "eingestellt; größere Änderungen folgen im Frühjahr.",
        "Russian": "Вчера вечером учёные представили результаты исследования, которое продолжалось "
        "почти десять лет и объединило несколько университетов.",
        "Hebrew": "אתמול בערב הציגו החוקרים את תוצאות המחקר שנמשך כמעט עשר שנים.",
        "Chinese": "昨天晚上，研究人员公布了一项持续近十年的研究结果，多所大学参与其中。",
    }
)

#: Smallest share of an English text's tokens for "fit", and for "partly fit".
_FIT, _PARTLY_FIT = 0.95, 0.8


@dataclass(frozen=True)
class Fitness:
    """Share of a teacher's tokens that a translation can name directly.

    A teacher's token that is one token of the student can be named from one row. All others need
    extra rows, or are in the tail.
    """

    vocabulary: float
    """Share of the teacher's tokens that are one token of the student."""
    texts: Mapping[str, float]
    """Name of a sample text -> share of its tokens, in the teacher's tokenizer."""

    @property
    def verdict(self) -> Verdict:
        """``fit`` if the first text's tokens are nearly all tokens of the student."""
        share = next(iter(self.texts.values()), self.vocabulary)
        return "fit" if share >= _FIT else "partly fit" if share >= _PARTLY_FIT else "unfit"

    @property
    def summary(self) -> str:
        """Verdict and shares as text."""
        texts = ", ".join(f"{name} {share:.1%}" for name, share in self.texts.items())
        return (
            f"{self.verdict} for translation: one student token each for {self.vocabulary:.0%} of "
            f"the teacher's tokens, and in texts for {texts}"
        )


def fitness(
    student: TokenTable, teacher: TextEncoder, texts: Mapping[str, str] = SAMPLES
) -> Fitness:
    """Measure a pair of tokenizers.

    Args:
        texts: name -> text; the first one determines the verdict.
    """
    spelled = {each for each in student.all_bytes if each}
    shared = np.array([each in spelled for each in teacher.table.all_bytes], dtype=np.bool_)
    tokens = np.array([bool(each) for each in teacher.table.all_bytes], dtype=np.bool_)
    ids = {name: teacher.encode(text) for name, text in texts.items()}
    return Fitness(
        vocabulary=float(shared.sum() / max(tokens.sum(), 1)),
        texts={name: float(shared[each].mean()) for name, each in ids.items() if each},
    )
