"""``LocalTeachers``: in-process teacher models on every rank, offloaded while idle."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mopd_losses.core.blockwise_head import Head
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.config.teacher_requirements import require_one_rank
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.local.model import (
    LocalModel,
    LocalScore,
    LocalTask,
    ScoreOptions,
    head_on,
)
from mopd_trainer.teachers.local.self_model import SelfModel


class LocalTeachers:
    """Replicas of the local teachers; each rank scores a share of every call.

    At most one model per rank is loaded on the device, for the duration of a call.

    Args:
        configs: of the local teachers, the same on every rank.
        device: the student's.
        tokens_per_batch: tokens of one forward pass, padding included.
        student: of self-teachers, with the weights of the start.

    Raises:
        ConfigError: when a model cannot be loaded, or cannot return the configured hidden
            states.
    """

    def __init__(
        self,
        configs: Mapping[str, TeacherConfig],
        tables: Mapping[str, TokenTable],
        *,
        device: torch.device,
        tokens_per_batch: int,
        ranks: Ranks,
        student: Student | None = None,
    ) -> None:
        self._ranks = ranks
        self._models: dict[str, LocalModel] = {}
        self._selves: dict[str, SelfModel] = {}
        for name, config in configs.items():
            if config.kind == "self":
                require_one_rank(name, ranks.size)
                assert student is not None  # passed where a run has such teachers
                own = SelfModel(config, student, tokens_per_batch=tokens_per_batch)
                _require_head(name, config, own.head)
                self._selves[name] = own
                continue
            own_device = teacher_device(name, config, device)
            model = LocalModel.load(name, config, tables[name], own_device, tokens_per_batch)
            model.offload()
            _require_head(name, config, model.head)
            self._models[name] = model

    @property
    def loaded(self) -> list[str]:
        """Names of the models on the device; never more than one."""
        return [name for name, model in self._models.items() if model.loaded]

    def head(self, name: str, device: torch.device) -> Head:
        """Return a copy of a teacher's head that stays on the device; a self-teacher's own."""
        if name in self._selves:
            own = self._selves[name].head
            assert own is not None  # checked when the teacher was created
            return own
        head = self._models[name].head
        assert head is not None  # checked when the model was loaded
        return head_on(head, device)

    def score(
        self, name: str, tasks: Sequence[LocalTask], options: ScoreOptions
    ) -> list[LocalScore]:
        """Score tasks on all ranks, on rank 0; non-zero ranks must be in ``serve``.

        Returns:
            One score per task, in the order of the tasks.

        Raises:
            RankError: when another rank is lost.
        """
        if self._ranks.size == 1:
            return self._score(name, tasks, options)
        shares = _shares(tasks, self._ranks.size)
        calls = [(name, [tasks[index] for index in share], options) for share in shares]
        gathered = self._ranks.gather(self._score(*self._ranks.scatter(calls)))
        scores = {
            index: score
            for share, part in zip(shares, gathered, strict=True)
            for index, score in zip(share, part, strict=True)
        }
        return [scores[index] for index in range(len(tasks))]

    def update(self, steps: int) -> None:
        """Update the weights of self-teachers after ``steps`` steps of the student."""
        for model in self._selves.values():
            model.update(steps)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights of self-teachers that a checkpoint needs, by teacher."""
        states = {name: model.state() for name, model in self._selves.items()}
        return {name: state for name, state in states.items() if state}

    def load_state(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load what ``state`` returned.

        Raises:
            KeyError: if a teacher or one of its weights is missing.
        """
        for name in self.state():
            self._selves[name].load_state(states[name])

    def serve(self) -> None:
        """Score this rank's shares of rank 0's calls until ``release``; on non-zero ranks.

        Raises:
            RankError: when another rank is lost.
        """
        while self._models and (call := self._ranks.scatter()) is not None:
            self._ranks.gather(self._score(*call))

    def release(self) -> None:
        """End ``serve`` on non-zero ranks, on rank 0."""
        if self._models and self._ranks.size > 1:
            self._ranks.scatter([None] * self._ranks.size)

    def _score(
        self, name: str, tasks: Sequence[LocalTask], options: ScoreOptions
    ) -> list[LocalScore]:
        """Score on this rank; a teacher without tasks stays offloaded."""
        if not tasks:
            return []
        if name in self._selves:
            return self._selves[name].score(tasks, options)
        model = self._models[name]
        model.load_weights()
        try:
            return model.score(tasks, options)
        finally:
            model.offload()


def _require_head(name: str, config: TeacherConfig, head: Head | None) -> None:
    """Raise ConfigError if hidden states are required that do not determine the logits."""
    if config.support == "full" and head is None:
        raise ConfigError(
            f"teachers.{name}.support: 'full' is not supported by this model, which changes its "
            "logits after the head, so that hidden states do not determine them. Set it to "
            "'teacher_topk'.",
            key=f"teachers.{name}.support",
        )


def _shares(tasks: Sequence[LocalTask], ranks: int) -> list[list[int]]:
    """Deal task indices round-robin, longest first, for similar token counts per rank."""
    longest_first = sorted(range(len(tasks)), key=lambda index: -tasks[index].input_tokens)
    return [longest_first[rank::ranks] for rank in range(ranks)]


def teacher_device(name: str, config: TeacherConfig, student: torch.device) -> torch.device:
    """Return the device of the replica: the student's, unless another one is configured.

    Raises:
        ConfigError: when the device is not available.
    """
    if config.device in (None, student.type):
        return student
    try:
        return torch.empty(0, device=config.device).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"teachers.{name}.device: not available (found {config.device!r}): {reason}",
            key=f"teachers.{name}.device",
        ) from error
