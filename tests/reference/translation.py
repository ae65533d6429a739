"""One model of a few texts through both tokenizers of a pair: a teacher's scores, and the truth.

The true probability of a student token, after those before it, is the mass of the texts whose
canonical tokenization begins with all of them, over the mass of the texts whose tokenization begins
with those before. By enumeration, see ``text_model``.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mopd_losses.translation.translation import ExtraRow, Translation
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.prefix_pairs import Pair, compared, rows_of
from tests.reference.text_model import TokenModel

Known = Mapping[ExtraRow, TopKLogprobs]


class Pending(Protocol):
    """The interface of ``PendingTranslation``."""

    @property
    def extra_rows(self) -> list[ExtraRow]: ...

    def add(self, rows: Known) -> None: ...

    def translations(self) -> list[Translation]: ...


class Translates(Protocol):
    """The interface of ``Translator``."""

    def begin(
        self, completions: Sequence[TokenSequence], scores: Sequence[TeacherScore]
    ) -> Pending: ...


class SharedTexts:
    """Texts with probabilities as the student and a teacher with other tokens model them.

    Args:
        top_k: entries of the teacher's rows; its complete vocabulary by default.
    """

    def __init__(self, pair: Pair, texts: Mapping[str, float], top_k: int | None = None) -> None:
        self.pair = pair
        self.texts = dict(texts)
        self.top_k = top_k or pair.teacher.logit_width
        self.rows_outside = 0  # extra rows after tokens that begin no text

    @cached_property
    def _student(self) -> TokenModel:
        return TokenModel(self.texts, self.pair.student.tokenize)

    @cached_property
    def _teacher(self) -> TokenModel:
        return TokenModel(self.texts, self.pair.teacher.tokenize)

    def completion(self, text: str, tokens: int | None = None) -> TokenSequence:
        """Return the first ``tokens`` student tokens of a text; its end is the last of all."""
        ids = self.pair.student.ids(self._student.written[text])
        return self.pair.student.table.sequence(ids[:tokens])

    def truth(self, completion: TokenSequence) -> Tensor:
        """[tokens, student's width], true log-probabilities in float64."""
        ids = completion.token_ids.tolist()
        row = rows_of(self.pair.student, self._student)
        return torch.stack([row(ids[:at]) for at in range(len(ids))])

    def score(self, completion: TokenSequence) -> TeacherScore:
        """Return the teacher's rows of a completion's canonical tokens."""
        teacher = self.pair.teacher
        ended = [teacher.end] if completion.ends_turn else []
        ids = [*teacher.encode_bytes(completion.text), *ended]
        row = rows_of(teacher, self._teacher)
        return TeacherScore(
            "teacher",
            teacher.table.sequence(ids),
            self._cut(ids, torch.stack([row(ids[:at]) for at in range(len(ids))])),
        )

    def extra_row(self, request: ExtraRow, scores: Sequence[TeacherScore]) -> TopKLogprobs:
        """Return one row; behind tokens that begin no text it is arbitrary."""
        before = scores[request.completion].token_ids[: request.teacher_tokens].tolist()
        teacher = self.pair.teacher
        try:
            row = rows_of(teacher, self._teacher)([*before, *request.token_ids])
        except KeyError:
            self.rows_outside += 1
            row = torch.full((teacher.logit_width,), -torch.inf, dtype=torch.float64)
            row[:2] = torch.tensor(0.5).log()
        return self._cut([int(row.argmax())], row[None])

    def _cut(self, ids: list[int], rows: Tensor) -> TopKLogprobs:
        exact = compared(self.pair, [], ids, rows, k=self.top_k).score.topk
        columns = exact.ids, exact.logprobs, exact.token_logprobs, exact.tail_logprobs
        return TopKLogprobs(*columns)

    def translated(
        self, translator: Translates, completions: Sequence[TokenSequence]
    ) -> tuple[list[Translation], Known]:
        """Translate with all rows that the translator requests; the rows are returned, too."""
        scores = [self.score(completion) for completion in completions]
        known: dict[ExtraRow, TopKLogprobs] = {}
        pending = translator.begin(completions, scores)
        while requests := pending.extra_rows:
            assert known.keys().isdisjoint(requests), "requested again"
            assert len({*requests}) == len(requests), "requested twice"
            rows = {request: self.extra_row(request, scores) for request in requests}
            pending.add(rows)
            known |= rows
        return pending.translations(), known
