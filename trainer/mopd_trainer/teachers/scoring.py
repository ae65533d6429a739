"""Rollouts -> training examples: every teacher of a sample reads it, and its answer is aligned."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

import numpy as np

from mopd_client.pool import TeacherPool
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_losses.alignment.byte_alignment import Alignment, align, identity_alignment
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.errors import DataError, TeacherError, TeacherUnavailableError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.teacher_input import TeacherInput, text_view, token_view
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.student_support import Counterparts, with_student_support
from mopd_trainer.teachers.waiting import Waiting

logger = logging.getLogger(__name__)

#: Why a sample is dropped, by the status of a refusal that one sequence of a request can cause.
_REASONS: dict[int | None, str] = {
    HTTPStatus.BAD_REQUEST: "refused",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_long",
    HTTPStatus.UNPROCESSABLE_ENTITY: "refused",
}

#: Between two calls to a teacher that is waited for; a call has its own pauses and deadline.
_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class _Unjudged:
    """Why a teacher has no score for a sample."""

    reason: str


#: Position among the rollouts -> a teacher's share of that sample.
_Shares = Mapping[int, float]


class RolloutScorer:
    """Asks each sample's own teachers; a sample that one of them cannot judge goes as a whole.

    What happens when a teacher cannot is its ``on_error``; a fallback's judgement counts with the
    share of the teacher that it stands in for.
    """

    def __init__(
        self,
        pool: TeacherPool,
        teachers: Mapping[str, Teacher],
        student: TokenTable,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._pool = pool
        self._teachers = teachers
        self._student = student
        self._clock = clock or Clock()
        self._waiting = {name: Waiting(name, self._clock) for name in teachers}
        self._counterparts = {
            name: Counterparts(teacher.projection)
            for name, teacher in teachers.items()
            if teacher.config.support == "student_topk"
        }
        # "teacher/reason" -> samples; "total" counts a sample once, however many could not judge it
        self.dropped: Counter[str] = Counter()

    def counters(self, teacher: str) -> Counters:
        """What asking a teacher cost so far."""
        return self._pool.client(teacher).counters

    def pop_dropped(self) -> Counter[str]:
        """Samples dropped since this was last asked, as in ``dropped``."""
        taken, self.dropped = self.dropped, Counter()
        return taken

    def projection(self, teacher: str) -> ProjectionMatrix:
        """Between the student's ids and a teacher's."""
        return self._teachers[teacher].projection

    async def score(self, rollouts: Sequence[Rollout]) -> list[TrainingExample]:
        """Examples in the rollouts' order, without those that were dropped (and counted).

        Raises:
            TeacherError: when a teacher fails whose policy is to end the run.
        """
        names = dict.fromkeys(name for r in rollouts for name in r.prompt.teachers)
        shares = {
            name: {
                at: rollout.prompt.teachers[name]
                for at, rollout in enumerate(rollouts)
                if name in rollout.prompt.teachers
            }
            for name in names
        }
        judged = await asyncio.gather(*[self._judge(n, shares[n], rollouts) for n in names])
        by_teacher = dict(zip(names, judged, strict=True))
        examples: list[TrainingExample] = []
        for at, rollout in enumerate(rollouts):
            judgements = [by_teacher[name].get(at) for name in rollout.prompt.teachers]
            found = [judgement for judgement in judgements if judgement is not None]
            if len(found) == len(judgements):
                examples.append(TrainingExample(rollout, _one_a_teacher(found)))
            else:
                self.dropped["total"] += 1
        return examples

    async def _judge(
        self, name: str, shares: _Shares, rollouts: Sequence[Rollout]
    ) -> dict[int, AlignedScore]:
        """Judgements by position among the rollouts, of one teacher or of who stands in for it;
        dropped ones are missing."""
        teacher = self._teachers[name]
        views = [self._view(teacher, rollouts[at]) for at in shares]
        scores = await self._ask(teacher, [view.request for view in views])
        judgements: dict[int, AlignedScore] = {}
        unjudged: dict[int, str] = {}
        for (at, share), view, score in zip(shares.items(), views, scores, strict=True):
            if isinstance(score, _Unjudged):
                unjudged[at] = score.reason
                continue
            alignment = aligned(teacher, view, score)
            if len(alignment):
                judgements[at] = AlignedScore(name, share, view, score, alignment)
            else:
                self.dropped[f"{name}/nothing_aligned"] += 1
        if unjudged and teacher.config.fallback is not None:
            self.counters(name).fallbacks += len(unjudged)
            given = {at: shares[at] for at in unjudged}
            return judgements | await self._judge(teacher.config.fallback, given, rollouts)
        self.dropped.update(f"{name}/{reason}" for reason in unjudged.values())
        return judgements

    def _view(self, teacher: Teacher, rollout: Rollout) -> TeacherInput:
        view = view_for(teacher, rollout, self._student)
        if teacher.name not in self._counterparts:
            return view
        return with_student_support(view, rollout, teacher, self._counterparts[teacher.name])

    async def _ask(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> Sequence[TeacherScore | _Unjudged]:
        """Scores, or why there is none, where the run goes on without.

        A request is refused as a whole when one of its sequences is; where the run goes on
        without that one, they are sent one by one, so that the others are not lost with it.
        """
        try:
            return await self._score(teacher, requests)
        except TeacherError as error:
            too_long = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            if not too_long and teacher.config.on_error in ("fail", "wait"):
                raise
            if error.status in _REASONS and len(requests) > 1:
                alone = await asyncio.gather(*[self._ask(teacher, [r]) for r in requests])
                return [scores[0] for scores in alone]
            logger.warning(
                "%d samples %s: %s",
                len(requests),
                "dropped" if teacher.config.fallback is None else teacher.config.on_error,
                error,
            )
            return [_Unjudged(_REASONS.get(error.status, "unavailable"))] * len(requests)

    async def _score(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> list[TeacherScore]:
        """Scores; where the run waits for an absent teacher, when it is back."""
        waiting, counters = self._waiting[teacher.name], self.counters(teacher.name)
        while True:
            try:
                scores = await self._pool.score(
                    teacher.name,
                    requests,
                    top_k=teacher.config.top_k,
                    temperature=teacher.config.temperature,
                    logprobs_dtype=teacher.config.logprobs_dtype,
                )
            except TeacherError as error:
                unavailable = isinstance(error, TeacherUnavailableError)
                if teacher.config.on_error != "wait" or not unavailable:
                    raise
                counters.waits += 1
                waiting.go_on(error)
                await self._clock.sleep(_WAIT_SECONDS)
            else:
                waiting.end()
                return scores


def _one_a_teacher(judgements: Sequence[AlignedScore]) -> tuple[AlignedScore, ...]:
    """A teacher that judges a sample for itself and for another one judges it with both shares."""
    found: dict[str, AlignedScore] = {}
    for judgement in judgements:
        same = found.get(judgement.teacher)
        if same is not None:
            judgement = replace(same, weight=same.weight + judgement.weight)
        found[judgement.teacher] = judgement
    return tuple(found.values())


def view_for(teacher: Teacher, rollout: Rollout, student: TokenTable) -> TeacherInput:
    """The completion as the teacher's loss needs it read."""
    if teacher.config.sends_token_ids:
        return token_view(rollout)
    return text_view(rollout, student, teacher.tokenizer.table)


def aligned(teacher: Teacher, view: TeacherInput, score: TeacherScore) -> Alignment:
    """The student's tokens beside those that the teacher scored.

    Raises:
        DataError: when a teacher was sent token ids and scored others.
    """
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
