"""``UnshardedCopy``: the unsharded model of a sharded student on rank 0."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import full_tensor


class UnshardedCopy:
    """Unsharded model on rank 0, for generation and saving.

    Generation reads every weight for every token: gathering the layers for each token would cost
    more than the memory of the copy (4 bytes a parameter). The copy stays in CPU memory unless the
    student generates with it.

    Args:
        model: not sharded yet; copied on rank 0 only.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        self._ranks = ranks
        self._copy: Any = copy.deepcopy(model) if ranks.is_rank_zero else None
        self._current = True

    def invalidate(self) -> None:
        """Mark the copy as outdated after the sharded weights have changed."""
        self._current = False

    @property
    def model(self) -> PreTrainedModel:
        """The copy, on rank 0.

        Raises:
            RuntimeError: when the weights have changed since the last ``gather``.
        """
        if not self._current:
            raise RuntimeError("the unsharded copy is outdated; call gather() on all ranks first")
        return self._copy

    @torch.no_grad()
    def gather(self, sharded: PreTrainedModel) -> None:
        """Copy every trained weight to rank 0 (no-op if current); all ranks must call it.

        Raises:
            RankError: when another rank is lost.
        """
        if self._current:
            return
        with self._ranks.collective():
            for name, parameter in sharded.named_parameters():
                if not parameter.requires_grad:
                    continue
                gathered = full_tensor(parameter)
                if self._copy is not None:
                    self._copy.get_parameter(name).copy_(gathered)
        self._current = True
