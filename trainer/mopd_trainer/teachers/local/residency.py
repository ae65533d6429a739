"""``LocalTeachers``: the models that sleep in a rank's memory, of which one at a time is awake.

Every rank has a copy of each, and scores its own share of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.teachers.local.model import LocalModel, LocalScore, LocalTask, Question, head_on


class LocalTeachers:
    """A rank's copies; all asleep, but for the time of a call.

    Args:
        device: the student's.
        tokens_per_batch: tokens that a teacher reads at once, padding counted.

    Raises:
        ConfigError: when a model cannot be loaded, or is to tell hidden states and has no head that
            makes its logits of them.
    """

    LOAD = "local_teachers.load"
    SCORE = "local_teachers.score"

    def __init__(
        self,
        configs: Mapping[str, TeacherConfig],
        tables: Mapping[str, TokenTable],
        *,
        device: torch.device,
        tokens_per_batch: int,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._models: dict[str, LocalModel] = {}
        if not configs:
            return
        ranks.lead(
            self.LOAD, configs=dict(configs), tables=dict(tables), tokens_per_batch=tokens_per_batch
        )
        for name, config in configs.items():
            own = _device(config, device)
            model = LocalModel.load(name, config, tables[name], own, tokens_per_batch)
            model.sleep()
            if config.support == "full" and model.head is None:
                raise ConfigError(
                    f"teacher {name!r} has support 'full', but this model changes its logits after "
                    "the head, so that no rows can be made of hidden states; set its support to "
                    "'teacher_topk'"
                )
            self._models[name] = model

    @property
    def awake(self) -> list[str]:
        """Never more than one."""
        return [name for name, model in self._models.items() if model.awake]

    def head(self, name: str, device: torch.device) -> Head:
        """A teacher's head, to stay on a device."""
        head = self._models[name].head
        assert head is not None  # refused when it was loaded
        return head_on(head, device)

    def score(self, name: str, tasks: Sequence[LocalTask], question: Question) -> list[LocalScore]:
        """One score a task, in their order. Rank 0 alone asks; all ranks work.

        Raises:
            RankError: when another rank is gone.
        """
        if self._ranks.size == 1:
            return self._scores(name, tasks, question)
        places = _shares(tasks, self._ranks.size)
        parts = [[tasks[at] for at in own] for own in places]
        with self._ranks.exchange:
            own = self._ranks.deal(self.SCORE, parts, teacher=name, question=question)
            found = self._ranks.collect(self._scores(name, own, question))
        by_place = {
            at: score
            for own, scores in zip(places, found, strict=True)
            for at, score in zip(own, scores, strict=True)
        }
        return [by_place[at] for at in range(len(tasks))]

    def led(self) -> dict[str, Callable[..., Any]]:
        """What a rank that follows does with its copies when it is told to."""
        return {self.SCORE: self._follow}

    def _follow(self, tasks: Sequence[LocalTask], *, teacher: str, question: Question) -> None:
        self._ranks.collect(self._scores(teacher, tasks, question))

    def _scores(
        self, name: str, tasks: Sequence[LocalTask], question: Question
    ) -> list[LocalScore]:
        """Of this rank; a teacher whom nobody asks anything sleeps on."""
        if not tasks:
            return []
        model = self._models[name]
        model.wake()
        try:
            return model.score(tasks, question)
        finally:
            model.sleep()


def _shares(tasks: Sequence[LocalTask], ranks: int) -> list[list[int]]:
    """Places of tasks by rank, about as many tokens for each: the longest first, in turn."""
    longest_first = sorted(range(len(tasks)), key=lambda at: -tasks[at].read)
    return [longest_first[rank::ranks] for rank in range(ranks)]


def _device(config: TeacherConfig, student: torch.device) -> torch.device:
    """Where a rank's copy is awake: beside the rank's student, unless that is another device.

    Raises:
        ConfigError: when there is no such device.
    """
    if config.device in (None, student.type):
        return student
    try:
        return torch.empty(0, device=config.device).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"a teacher's device is {config.device!r}, which is not to be had: {reason}"
        ) from error
