"""``RolloutWorker``: a whole student in a process of its own, which writes and is not trained."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch

from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import student_topk
from mopd_trainer.rollouts.remote_sampler import Weights
from mopd_trainer.rollouts.vllm.start import started_vllm
from mopd_trainer.student.student import Generation, Student


class RolloutWorker:
    """Writes with ``rollout.engine``. It is told with every batch which weights write it, so that
    one that was started again needs nothing but the next batch.

    Raises:
        ConfigError: when the student or its engine cannot be had here.
    """

    def __init__(self, config: RunConfig) -> None:
        vllm = config.rollout.engine == "vllm"
        settings = config.student.model_copy(
            # vLLM has weights of its own; ours only pass them on.
            update={"sharding": "none", "gradient_checkpointing": False}
            | ({"device": "cpu"} if vllm else {})
        )
        self._settings = config.rollout
        self._keep_topk = student_topk(config.scoring_teachers)
        self._student = Student.load(settings)
        self._student.model.requires_grad_(False)
        self._engine = started_vllm(config, self._student) if vllm else None
        self._version: int | None = None
        self._turn = asyncio.Lock()

    async def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        version: int,
        weights: Callable[[], Awaitable[Weights]],
    ) -> list[Generation]:
        """One completion for each prompt.

        Args:
            version: of the weights that are to write.
            weights: fetches them, where they are not those of the batch before.
        """
        async with self._turn:
            if version != self._version:
                self._take(await weights())
                if self._engine is not None:
                    await self._engine.push()
                self._version = version
        if self._engine is not None:
            return [await self._engine.generate(ids, seed=seed) for ids in prompts]
        return self._student.generate(prompts, self._settings, seed=seed, keep_topk=self._keep_topk)

    def close(self) -> None:
        """Ends the engine, where there is one beside this process."""
        if self._engine is not None:
            self._engine.close()

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        parameters = dict(self._student.model.named_parameters())
        for name, values in weights.items():
            parameters[name].copy_(torch.tensor(values))
        self._student.weights_changed()
