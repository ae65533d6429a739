"""``FullStateAdamW``: AdamW whose state dict is unsharded for any number of ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import full_tensor, shard_like


class FullStateAdamW(torch.optim.AdamW):
    """AdamW with the state dict of a single rank, so that checkpoints fit any number of ranks.

    All ranks must call ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, ranks: Ranks, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self._ranks = ranks

    def state_dict(self) -> dict[str, Any]:
        """Gather the unsharded state on all ranks.

        Raises:
            RankError: when another rank is lost.
        """
        state: dict[str, Any] = super().state_dict()
        if self._ranks.size > 1:
            with self._ranks.collective():
                state["state"] = {
                    number: {name: _unshard(value) for name, value in moments.items()}
                    for number, moments in sorted(state["state"].items())
                }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load rank 0's unsharded state on all ranks; non-zero ranks pass ``{}``.

        Raises:
            ValueError: when the state is of other parameters; nothing is loaded.
            RankError: when another rank is lost.
        """
        if self._ranks.size == 1:
            super().load_state_dict(state_dict)
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments: dict[int, dict[str, Any]] = state_dict.get("state", {})
        for number, values in moments.items():
            for name, value in values.items():
                if _is_moment(value) and (
                    number >= len(parameters) or value.shape != parameters[number].shape
                ):
                    raise ValueError(f"{name} of parameter {number} has shape {list(value.shape)}")
        outline = self._ranks.broadcast(
            {
                **state_dict,
                "state": {
                    number: {n: None if _is_moment(v) else v for n, v in values.items()}
                    for number, values in moments.items()
                },
            }
        )
        with self._ranks.collective():
            state = {
                number: {
                    name: shard_like(parameters[number], moments.get(number, {}).get(name))
                    if value is None
                    else value
                    for name, value in values.items()
                }
                for number, values in outline["state"].items()
            }
        super().load_state_dict({**outline, "state": state})


def _is_moment(value: Any) -> bool:
    """True for a tensor of the parameter's shape; steps are scalars."""
    return isinstance(value, Tensor) and value.dim() > 0


def _unshard(value: Any) -> Any:
    return full_tensor(value).cpu() if isinstance(value, DTensor) else value
