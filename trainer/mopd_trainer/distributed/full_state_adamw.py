"""``WholeStateAdamW``: AdamW whose saved state is whole, on however many ranks it stands."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import like_shards_of, whole

#: Parameter number -> name -> what the optimizer keeps.
_Moments = Mapping[int, Mapping[str, Any]]


class WholeStateAdamW(torch.optim.AdamW):
    """What ``state_dict`` gives on one rank it gives on the first of several, and takes back.

    So a checkpoint does not know on how many ranks it was made. The ranks that follow call
    ``state_dict`` and ``take`` when the first one says so, under the names that stand here.
    """

    STATE = "optimizer.state_dict"
    TAKE = "optimizer.take"

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, ranks: Ranks, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self._ranks = ranks

    def state_dict(self) -> dict[str, Any]:
        """As on one rank; all ranks have it, the first writes it."""
        told: dict[str, Any] = super().state_dict()
        if self._ranks.size == 1:
            return told
        self._ranks.lead(self.STATE)
        with self._ranks.together():
            told["state"] = {
                number: {name: _kept(value) for name, value in told["state"][number].items()}
                for number in sorted(told["state"])
            }
        return told

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a whole state over, on all ranks.

        Raises:
            ValueError: when it is of other parameters; nothing is taken then.
        """
        if self._ranks.size == 1:
            super().load_state_dict(state_dict)
            return
        given: dict[int, dict[str, Any]] = state_dict["state"]
        parameters = self._parameters()
        for number, moments in given.items():
            for name, value in moments.items():
                if _is_large(value) and (
                    number >= len(parameters) or value.shape != parameters[number].shape
                ):
                    raise ValueError(f"{name} of parameter {number} has shape {list(value.shape)}")
        told = {
            number: {name: None if _is_large(value) else value for name, value in moments.items()}
            for number, moments in given.items()
        }
        outline = {**state_dict, "state": told}
        self._ranks.lead(self.TAKE, outline=outline)
        self.take(outline, given)

    def take(self, outline: dict[str, Any], given: _Moments | None = None) -> None:
        """This rank's part of a state.

        Args:
            outline: the state with None for every tensor that is as large as its parameter.
            given: the tensors, on rank 0.
        """
        parameters, given = self._parameters(), given or {}
        with self._ranks.together():
            state = {
                number: {
                    name: like_shards_of(parameters[number], given.get(number, {}).get(name))
                    if value is None
                    else value
                    for name, value in moments.items()
                }
                for number, moments in outline["state"].items()
            }
        super().load_state_dict({**outline, "state": state})

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _kept(value: Any) -> Any:
    return whole(value).cpu() if isinstance(value, DTensor) else value
