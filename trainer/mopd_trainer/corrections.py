"""``Corrector``: let the student continue its completions behind what a teacher corrected."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mopd_protocol.samples import Rollout
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.corrections import Correction, correction_of
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.metrics.timers import StepTimer
from mopd_trainer.rollouts.source import CompletionGenerator
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.scoring import RolloutScorer


class Corrector:
    """Correct scored completions ``rollout.corrections`` times.

    A function of the seed, the step, the completions, their scores and the weights.

    Args:
        kept_topk: the student's likely ids at each token that corrected examples keep, for
            teachers; None for all that corrections had.
    """

    def __init__(
        self,
        generator: CompletionGenerator,
        scorer: RolloutScorer,
        student: StudentIdentity,
        config: RolloutConfig,
        *,
        seed: int,
        kept_topk: int | None = None,
        timer: StepTimer | None = None,
    ) -> None:
        self._generator = generator
        self._scorer = scorer
        self._student = student
        self._config = config
        self._seed = seed
        self._kept_topk = kept_topk
        self._timer = timer or StepTimer()

    async def corrected(
        self, examples: Sequence[TrainingExample], *, step: int, place: int
    ) -> list[TrainingExample]:
        """Return the examples, corrected ones with new scores, in the same order.

        A corrected completion without a score is dropped and counted by the scorer.

        Args:
            place: of the first completion in its step.

        Raises:
            TeacherError: see ``RolloutScorer.score``.
        """
        by_index = dict(enumerate(examples))
        changed = list(by_index)
        for number in range(self._config.corrections):
            corrections = {
                index: correction
                for index in changed
                if (
                    correction := correction_of(
                        by_index[index],
                        self._student.table,
                        self._scorer.table,
                        least_ratio=self._config.correction_ratio,
                        significance=self._config.correction_significance,
                    )
                )
            }
            if not corrections:
                break
            seed = derived_seed(self._seed, step, place, number)
            with self._timer.phase("sample"):
                rollouts = await self._continued([*corrections.values()], seed)
            with self._timer.phase("score"):
                scored = {id(each.rollout): each for each in await self._scorer.score(rollouts)}
            for index, rollout in zip(corrections, rollouts, strict=True):
                if id(rollout) in scored:
                    by_index[index] = scored[id(rollout)]
                else:
                    del by_index[index]
            changed = [index for index in corrections if index in by_index]
        return [self._with_kept_ids(example) for example in by_index.values()]

    def _with_kept_ids(self, example: TrainingExample) -> TrainingExample:
        """Drop the student's ids that corrections do not need any more."""
        ids = example.rollout.student_topk_ids
        if self._kept_topk is None or ids is None:
            return example
        kept = ids[:, : self._kept_topk] if self._kept_topk else None
        return replace(example, rollout=replace(example.rollout, student_topk_ids=kept))

    async def _continued(self, corrections: Sequence[Correction], seed: int) -> list[Rollout]:
        """Return the rollouts that continue from corrections."""
        ending = self._student.table.roles.ending
        longest = self._config.max_new_tokens
        rooms = {
            index: longest - len(each.token_ids)
            for index, each in enumerate(corrections)
            if each.token_id not in ending and len(each.token_ids) < longest
        }
        generations: dict[int, Generation] = {}
        for number, group in enumerate(self._groups(corrections, rooms)):
            most = max(rooms[index] for index in group)
            prompts = [_beginning(corrections[index]) for index in group]
            settings = self._config.model_copy(update={"max_new_tokens": most})
            generated = await self._generator.generate(
                prompts, settings, seed=derived_seed(seed, number)
            )
            for index, generation in zip(group, generated, strict=True):
                generations[index] = generation.first(rooms[index])
        table = self._student.table
        return [
            corrected_rollout(each, table, generations.get(index))
            for index, each in enumerate(corrections)
        ]

    def _groups(
        self, corrections: Sequence[Correction], rooms: Mapping[int, int]
    ) -> list[list[int]]:
        """Return groups to generate together, so that all have room for the longest continuation
        of the group: one, unless a prompt almost fills the student's context."""
        limit = self._student.max_length
        most = max(rooms.values(), default=0)
        fits = {
            index: limit is None or len(_beginning(corrections[index])) + most <= limit
            for index in rooms
        }
        together = [index for index in rooms if fits[index]]
        groups = [together] if together else []
        return groups + [[index] for index in rooms if not fits[index]]


def corrected_rollout(
    correction: Correction, table: TokenTable, continuation: Generation | None
) -> Rollout:
    """Return the rollout with the corrected beginning and the student's continuation of it.

    The corrected token has a logprob of 0: it was determined, not sampled.

    Args:
        table: the student's.
        continuation: None behind the last token.
    """
    rollout, kept = correction.rollout, correction.kept
    assert rollout.sampled_logprobs is not None  # of a rollout, not of a reference answer
    assert rollout.student_topk_ids is not None  # kept for corrections
    ids = correction.token_ids
    logprobs = [*rollout.sampled_logprobs[:kept].tolist(), 0.0]
    topk_ids = [rollout.student_topk_ids[: kept + 1]]
    entropies = [] if rollout.entropies is None else [rollout.entropies[: kept + 1]]
    if continuation is not None:
        ids += continuation.token_ids
        logprobs += continuation.logprobs
        assert continuation.topk_ids is not None
        topk_ids.append(continuation.topk_ids)
        if rollout.entropies is not None:
            assert continuation.entropies is not None
            entropies.append(continuation.entropies)
    completion = table.sequence(ids)
    earlier = (at for at in rollout.corrected_tokens if at < kept)
    return replace(
        rollout,
        completion=completion,
        sampled_logprobs=np.array(logprobs, dtype=np.float32),
        finish_reason="stop" if completion.ends_turn else "length",
        student_topk_ids=np.concatenate(topk_ids),
        entropies=np.concatenate(entropies) if entropies else None,
        corrected_tokens=(*earlier, kept),
    )


def _beginning(correction: Correction) -> list[int]:
    return [*correction.rollout.prompt_token_ids.tolist(), *correction.token_ids]
