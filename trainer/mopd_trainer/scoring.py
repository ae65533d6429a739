"""Rollouts -> training examples: every teacher of a sample reads it, and its answer is aligned."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import numpy as np

from mopd_client.pool import TeacherPool
from mopd_losses.alignment import Alignment, align, identity_alignment
from mopd_protocol.errors import DataError, TeacherError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.token_table import TokenTable
from mopd_trainer.examples import TeacherJudgement, TrainingExample
from mopd_trainer.teacher_view import TeacherView, text_view, token_view
from mopd_trainer.teachers import Teacher

logger = logging.getLogger(__name__)

#: Why a sample is dropped, by the status of a refusal that one sequence of a request can cause.
_REASONS: dict[int | None, str] = {
    HTTPStatus.BAD_REQUEST: "refused",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_long",
    HTTPStatus.UNPROCESSABLE_ENTITY: "refused",
}


class Scorer:
    """Asks each sample's own teachers; a sample that one of them cannot judge goes as a whole."""

    def __init__(
        self, pool: TeacherPool, teachers: Mapping[str, Teacher], student: TokenTable
    ) -> None:
        self._pool = pool
        self._teachers = teachers
        self._student = student
        self.dropped: Counter[str] = Counter()  # "teacher/reason" -> samples

    async def score(self, rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        """Examples in the rollouts' order, without those that were dropped (and counted).

        Raises:
            TeacherError: when a teacher fails whose policy is to end the run.
        """
        names = dict.fromkeys(name for r in rollouts for name in r.prompt.teachers)
        judged = await asyncio.gather(*[self._judge_all(name, rollouts) for name in names])
        by_teacher = dict(zip(names, judged, strict=True))
        examples: list[TrainingExample] = []
        for at, rollout in enumerate(rollouts):
            judgements = [by_teacher[name].get(at) for name in rollout.prompt.teachers]
            found = tuple(judgement for judgement in judgements if judgement is not None)
            if len(found) == len(judgements):
                examples.append(TrainingExample(rollout, found))
        return examples

    async def _judge_all(
        self, name: str, rollouts: Sequence[Rollout]
    ) -> dict[int, TeacherJudgement]:
        """Judgements of one teacher by position among the rollouts; dropped ones are missing."""
        teacher = self._teachers[name]
        mine = [at for at, rollout in enumerate(rollouts) if name in rollout.prompt.teachers]
        views = [self._view(teacher, rollouts[at]) for at in mine]
        scores = await self._ask(teacher, [view.request for view in views])
        judgements: dict[int, TeacherJudgement] = {}
        for at, view, score in zip(mine, views, scores, strict=True):
            if score is None:
                continue
            alignment = _aligned(teacher, view, score)
            if not len(alignment):
                self.dropped[f"{name}/nothing_aligned"] += 1
                continue
            weight = rollouts[at].prompt.teachers[name]
            judgements[at] = TeacherJudgement(name, weight, view, score, alignment)
        return judgements

    def _view(self, teacher: Teacher, rollout: Rollout) -> TeacherView:
        if teacher.config.sends_token_ids:
            return token_view(rollout)
        return text_view(rollout, self._student, teacher.tokenizer.table)

    async def _ask(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> Sequence[TeacherScore | None]:
        """Scores, None where a sample was dropped.

        A request is refused as a whole when one of its sequences is; where the run goes on
        without that one, they are sent one by one, so that the others are not lost with it.
        """
        try:
            return await self._score(teacher, requests)
        except TeacherError as error:
            too_long = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            if not too_long and teacher.config.on_error == "fail":
                raise
            if error.status in _REASONS and len(requests) > 1:
                alone = await asyncio.gather(*[self._ask(teacher, [r]) for r in requests])
                return [scores[0] for scores in alone]
            reason = _REASONS.get(error.status, "unavailable")
            logger.warning("%d samples dropped: %s", len(requests), error)
            self.dropped[f"{teacher.name}/{reason}"] += len(requests)
            return [None] * len(requests)

    async def _score(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> list[TeacherScore]:
        return await self._pool.score(
            teacher.name,
            requests,
            top_k=teacher.config.top_k,
            temperature=teacher.config.temperature,
            logprobs_dtype=teacher.config.logprobs_dtype,
        )


def _aligned(teacher: Teacher, view: TeacherView, score: TeacherScore) -> Alignment:
    if not teacher.config.sends_token_ids:
        return align(view.completion, score.completion)
    sent = np.array(view.request.completion_token_ids, dtype=np.int32)
    if (
        len(score.completion) != len(view.completion)
        or (score.completion.token_ids[: len(sent)] != sent).any()
    ):
        raise DataError(
            f"teacher {teacher.name!r} was sent {len(view.completion)} token ids and scored others"
        )
    return identity_alignment(len(view.completion))
