"""``LossOutput``: what every loss returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Nats per student token, unreduced: only the trainer divides, by the step's token count.

    ``measured`` holds detached vectors, one value per place where the loss compared the two
    models, so that the trainer can take means and percentiles over a whole step.
    """

    per_token: Float[Tensor, "tokens"]  # nats; zero, with a graph, where nothing was compared
    measured: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> [places]
