"""Score rollouts with their teachers, align tokens, build training examples."""

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
from mopd_losses.alignment.byte_alignment import Alignment, identity_alignment
from mopd_losses.alignment.text_offsets import align_text
from mopd_losses.core.loss import Lookahead
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_protocol.errors import DataError, TeacherError, TeacherUnavailableError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Rollout, TeacherScore
from mopd_protocol.teacher_input import TeacherInput
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.selection import TokenSelection
from mopd_trainer.data.teacher_input import text_view, token_view
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.control import Controls
from mopd_trainer.teachers.lookaheads import (
    continued,
    open_tokens_of,
    requested,
    scored_lookahead,
)
from mopd_trainer.teachers.student_support import Counterparts, with_student_support
from mopd_trainer.teachers.turns import TeacherTurns

logger = logging.getLogger(__name__)

#: HTTP status of a request with one invalid sequence -> reason to drop the sample.
_REASONS: dict[int | None, str] = {
    HTTPStatus.BAD_REQUEST: "refused",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_long",
    HTTPStatus.UNPROCESSABLE_ENTITY: "refused",
}

#: Between two calls to an unavailable teacher; a call has its own retries and deadline.
_WAIT_SECONDS = 5.0
#: Between two log messages about an unavailable teacher.
_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class _NoScore:
    """The reason for a missing score."""

    reason: str


#: Index among the rollouts -> a teacher's share of that sample.
_Shares = Mapping[int, float]


class RolloutScorer:
    """Score each sample with its teachers; drop a sample that one of them cannot score.

    A failing teacher is handled by ``on_error``; a fallback's score has the share of the teacher
    it replaces.
    """

    def __init__(
        self,
        pool: TeacherPool,
        teachers: Mapping[str, Teacher],
        student: TokenTable,
        *,
        controls: Controls | None = None,
        selection: TokenSelection | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._controls = controls or Controls()
        self._pool = pool
        self._teachers = teachers
        self._student = student
        self._selection = selection or TokenSelection(student)
        self._clock = clock or Clock()
        self._turns = TeacherTurns({name: each.config.url for name, each in teachers.items()})
        self._outages = {name: _Outage(name, self._clock) for name in teachers}
        self._counterparts = {
            name: Counterparts(teacher.projection)
            for name, teacher in teachers.items()
            if teacher.config.support == "student_topk"
        }
        self._open_tokens = {
            name: open_tokens_of(teacher)
            for name, teacher in teachers.items()
            if teacher.lookaheads and teacher.config.control is None
        }
        # "teacher/reason" -> samples; "total" counts a sample once, for any number of teachers
        self.dropped: Counter[str] = Counter()

    def counters(self, teacher: str) -> Counters:
        """Return the counters of a teacher's client."""
        return self._pool.client(teacher).counters

    def pop_dropped(self) -> Counter[str]:
        """Return and reset ``dropped``."""
        dropped, self.dropped = self.dropped, Counter()
        return dropped

    def table(self, teacher: str) -> TokenTable:
        """Return the token table of a teacher's tokenizer."""
        return self._teachers[teacher].tokenizer.table

    def projection(self, teacher: str) -> ProjectionMatrix:
        """Return the projection between the student's ids and a teacher's."""
        return self._teachers[teacher].projection

    async def score(
        self, rollouts: Sequence[Rollout], *, sampled: asyncio.Event | None = None
    ) -> list[TrainingExample]:
        """Return examples in the order of the rollouts, without the dropped ones (counted).

        ``sampled`` is set when the step is sampled, which teachers that are swapped may wait for.

        Raises:
            TeacherError: when a teacher fails whose ``on_error`` is 'fail'.
        """
        names = list(dict.fromkeys(name for r in rollouts for name in r.prompt.teachers))
        sent = [self._selection.sent(each) if each.prompt.teachers else each for each in rollouts]

        async def score_by(name: str) -> dict[int, AlignedScore]:
            if sampled is not None:
                await self._turns.sampled(name, sampled)
            shares = {
                index: rollout.prompt.teachers[name]
                for index, rollout in enumerate(rollouts)
                if name in rollout.prompt.teachers
            }
            return await self._score_by(name, shares, sent)

        results = await asyncio.gather(*[score_by(name) for name in names])
        by_teacher = dict(zip(names, results, strict=True))
        examples: list[TrainingExample] = []
        for index, rollout in enumerate(rollouts):
            scores = [by_teacher[name].get(index) for name in rollout.prompt.teachers]
            complete = [self._selection.selected(rollout, each) for each in scores if each]
            if len(complete) == len(scores):
                examples.append(TrainingExample(rollout, _merge_by_teacher(complete)))
            else:
                self.dropped["total"] += 1
        return examples

    async def _score_by(
        self, name: str, shares: _Shares, rollouts: Sequence[Rollout]
    ) -> dict[int, AlignedScore]:
        """Return scores of one teacher, or of its fallback, by index; dropped ones are missing."""
        teacher = self._teachers[name]
        inputs = [self._teacher_input(teacher, rollouts[index]) for index in shares]
        results = await self._request(teacher, [each.request for each in inputs])
        scores: dict[int, AlignedScore] = {}
        failed: dict[int, str] = {}
        for (index, share), each, result in zip(shares.items(), inputs, results, strict=True):
            if isinstance(result, _NoScore):
                failed[index] = result.reason
                continue
            alignment = aligned(teacher, each, result)
            if len(alignment):
                score = AlignedScore(name, share, each, result, alignment)
                table = teacher.tokenizer.table
                scores[index] = self._controls.aligned(score, rollouts[index], table)
            else:
                self.dropped[f"{name}/nothing_aligned"] += 1
        scores = await self._with_lookaheads(teacher, scores, rollouts)
        if failed and teacher.config.fallback is not None:
            self.counters(name).fallbacks += len(failed)
            failed_shares = {index: shares[index] for index in failed}
            return scores | await self._score_by(teacher.config.fallback, failed_shares, rollouts)
        self.dropped.update(f"{name}/{reason}" for reason in failed.values())
        return scores

    async def _with_lookaheads(
        self,
        teacher: Teacher,
        scores: dict[int, AlignedScore],
        rollouts: Sequence[Rollout],
    ) -> dict[int, AlignedScore]:
        """Score what follows likely tokens that completions do not continue with, in rounds: each
        adds what the teacher is sure of behind the last one's text."""
        open_tokens = self._open_tokens.get(teacher.name)
        if open_tokens is None:
            return scores
        sent = [
            (index, token, request)
            for index, score in scores.items()
            for token, request in requested(
                open_tokens, score, teacher.lookaheads, rollouts[index].student_topk_ids
            )
        ]
        lookaheads: dict[int, dict[int, Lookahead]] = {index: {} for index in scores}
        for remaining in reversed(range(teacher.lookahead_rounds)):
            if not sent:
                break
            results = await self._request(teacher, [request for *_, request in sent])
            received, sent = zip(sent, results, strict=True), []
            for (index, token, _), result in received:
                if isinstance(result, _NoScore):
                    continue
                score, earlier = scores[index], lookaheads[index].get(token.teacher_row)
                behind, tokens = scored_lookahead(open_tokens, token, score.score, result)
                if behind is None:
                    continue
                if earlier and len(behind.token_ids) <= len(earlier.token_ids):
                    continue
                lookaheads[index][token.teacher_row] = behind
                likely_ids = rollouts[index].student_topk_ids
                request = remaining and continued(open_tokens, tokens, score, behind, likely_ids)
                if request:
                    sent.append((index, token, request))
        return {
            index: replace(score, lookaheads=tuple(lookaheads[index].values()))
            for index, score in scores.items()
        }

    def _teacher_input(self, teacher: Teacher, rollout: Rollout) -> TeacherInput:
        rollout = self._controls.scored_rollout(teacher.name, rollout)
        teacher_input = input_for(teacher, rollout, self._student)
        if teacher.name not in self._counterparts:
            return teacher_input
        counterparts = self._counterparts[teacher.name]
        return with_student_support(teacher_input, rollout, teacher, counterparts)

    async def _request(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> Sequence[TeacherScore | _NoScore]:
        """Return scores, or reasons to drop samples.

        One invalid sequence fails its request. If the run continues without the sample, the
        sequences are sent one by one, so that only the invalid ones are lost.
        """
        try:
            return await self._score_when_available(teacher, requests)
        except TeacherError as error:
            too_long = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            if not too_long and teacher.config.on_error in ("fail", "wait"):
                raise
            if error.status in _REASONS and len(requests) > 1:
                single = await asyncio.gather(*[self._request(teacher, [r]) for r in requests])
                return [results[0] for results in single]
            logger.warning(
                "%d samples %s: %s",
                len(requests),
                "dropped" if teacher.config.fallback is None else teacher.config.on_error,
                error,
            )
            return [_NoScore(_REASONS.get(error.status, "unavailable"))] * len(requests)

    async def _score_when_available(
        self, teacher: Teacher, requests: Sequence[SequenceRequest]
    ) -> list[TeacherScore]:
        """Return scores; with ``on_error`` 'wait', retry until the teacher is available."""
        outage, counters = self._outages[teacher.name], self.counters(teacher.name)
        while True:
            try:
                async with self._turns.turn(teacher.name):
                    scores = await self._pool.score(
                        teacher.name,
                        requests,
                        top_k=teacher.config.top_k,
                        temperature=teacher.config.scored_temperature,
                        logprobs_dtype=teacher.config.logprobs_dtype,
                    )
            except TeacherError as error:
                unavailable = isinstance(error, TeacherUnavailableError)
                if teacher.config.on_error != "wait" or not unavailable:
                    raise
                counters.waits += 1
                outage.log(error)
                await self._clock.sleep(_WAIT_SECONDS)
            else:
                outage.end()
                return scores


class _Outage:
    """Rate-limited log messages while a teacher is unavailable, shared by all its requests."""

    def __init__(self, teacher: str, clock: Clock) -> None:
        self._teacher = teacher
        self._clock = clock
        self._since: float | None = None
        self._logged_at = 0.0

    def log(self, error: TeacherError) -> None:
        """Log the outage, unless it was logged recently."""
        now = self._clock.now()
        if self._since is not None and now - self._logged_at < _LOG_SECONDS:
            return
        self._since = now if self._since is None else self._since
        self._logged_at = now
        logger.warning(
            "waiting for teacher %r, %.0f s so far: %s", self._teacher, now - self._since, error
        )

    def end(self) -> None:
        """Log the end of the outage, if there was one."""
        if self._since is not None:
            seconds = self._clock.now() - self._since
            logger.warning("teacher %r is available after %.0f s", self._teacher, seconds)
        self._since = None


def _merge_by_teacher(scores: Sequence[AlignedScore]) -> tuple[AlignedScore, ...]:
    """Add the shares of a teacher that scores a sample for itself and as a fallback."""
    merged: dict[str, AlignedScore] = {}
    for score in scores:
        if score.teacher in merged:
            score = replace(score, weight=merged[score.teacher].weight + score.weight)
        merged[score.teacher] = score
    return tuple(merged.values())


def input_for(teacher: Teacher, rollout: Rollout, student: TokenTable) -> TeacherInput:
    """Return the request that the teacher's loss needs: token ids or text."""
    if teacher.config.sends_token_ids:
        view = token_view(rollout, teacher.controls, teacher.name)
    else:
        view = text_view(rollout, student, teacher.tokenizer.encoder, teacher.name)
    if not teacher.config.chat_template_kwargs:
        return view
    variables = {"chat_template_kwargs": teacher.config.chat_template_kwargs}
    return replace(view, request=view.request.model_copy(update=variables))


def aligned(teacher: Teacher, teacher_input: TeacherInput, score: TeacherScore) -> Alignment:
    """Align the student's tokens with the scored tokens.

    Raises:
        DataError: when the teacher scored other token ids than it received.
    """
    completion = teacher_input.completion
    if not teacher.config.sends_token_ids:
        return align_text(completion, score.completion, teacher.tokenizer.encoder)
    sent = np.array(teacher_input.request.completion_token_ids, dtype=np.int32)
    scored = score.completion
    if len(scored) != len(completion) or (scored.token_ids[: len(sent)] != sent).any():
        raise DataError(
            f"teacher {teacher.name!r}: scored other token ids than it received (found "
            f"{len(scored)} tokens, expected {len(completion)})"
        )
    return identity_alignment(len(completion))
