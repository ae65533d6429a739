"""``UnshardedCopy``: a sharded student, whole on rank 0, to write completions and folders with."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import whole


class UnshardedCopy:
    """A second model on rank 0, brought up to date when it is needed and not before.

    Generation reads every weight for every token, so it wants them in one place: gathering layers
    again for each token would cost more than the copy's memory (4 bytes a parameter). It stays in
    the CPU's memory until it is moved to where it shall write; where something else writes, from
    here its weights only go to a file, or to whoever does.
    """

    GATHER = "student.gather"

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        """Must be made before the model is sharded; nothing is copied where a rank follows."""
        self._ranks = ranks
        self._copy: Any = copy.deepcopy(model) if ranks.leads else None
        self._current = True

    def outdate(self) -> None:
        """The sharded weights have changed."""
        self._current = False

    def of(self, sharded: PreTrainedModel) -> PreTrainedModel:
        """The model whole, as its weights are now. Rank 0 alone asks.

        Raises:
            RankError: when another rank is gone.
        """
        assert self._copy is not None
        if not self._current:
            self._ranks.lead(self.GATHER)
            self.gather(sharded)
        return self._copy

    @torch.no_grad()
    def gather(self, sharded: PreTrainedModel) -> None:
        """Every weight that is trained, one after the other; all ranks at once."""
        with self._ranks.together():
            for name, parameter in sharded.named_parameters():
                if not parameter.requires_grad:
                    continue
                gathered = whole(parameter)
                if self._copy is not None:
                    self._copy.get_parameter(name).copy_(gathered)
        self._current = True
