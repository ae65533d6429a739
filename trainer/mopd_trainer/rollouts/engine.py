"""``GenerationEngine``: completes prompts, each by itself, with pushed weights."""

from collections.abc import Sequence
from typing import Protocol

from mopd_trainer.student.student import Generation


class GenerationEngine(Protocol):
    """Writes with the weights that were pushed last; batches whatever is in flight by itself."""

    async def generate(self, prompt_ids: Sequence[int], *, seed: int) -> Generation:
        """One completion, as soon as it is finished; the same seed and weights write the same."""
        ...

    async def push(self) -> None:
        """Takes over the student's weights of now. Nothing may be in flight."""
        ...
