"""``RolloutWorker``: an unsharded student in a separate process, for sampling."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch

from mopd_trainer.config.run import RolloutConfig, RunConfig
from mopd_trainer.rollouts.engine import configured_engine
from mopd_trainer.rollouts.remote_sampler import Weights
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student


class RolloutWorker:
    """Sample with ``rollout.engine``.

    Every call names the version of the weights, so that a restarted worker needs no other state.

    Raises:
        ConfigError: when the student or its engine cannot be loaded.
    """

    def __init__(self, config: RunConfig) -> None:
        row = configured_engine(config.rollout)
        settings = config.student.model_copy(
            # An engine has separate weights; the student only passes new ones on.
            update={"sharding": "none", "gradient_checkpointing": False}
            | ({} if row is None else {"device": "cpu"})
        )
        self._settings = config.rollout
        self._keep_topk = config.kept_topk
        self._keep_entropies = config.tokens.keeps_entropies
        self._student = Student.load(settings)
        self._student.model.requires_grad_(False)
        self._engine = None if row is None else row.start(config, self._student)
        self._version: int | None = None
        self._lock = asyncio.Lock()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        version: int,
        weights: Callable[[], Awaitable[Weights]],
        settings: RolloutConfig | None = None,
    ) -> list[Generation]:
        """Return one completion per prompt.

        Args:
            version: of the weights to sample with.
            weights: fetches these weights; called if the version differs from the loaded one.
            settings: default: those of the run.
        """
        async with self._lock:
            if version != self._version:
                self._load(await weights())
                if self._engine is not None:
                    await self._engine.push_weights()
                self._version = version
        if self._engine is not None:
            return [
                await self._engine.generate(ids, seed=seed, settings=settings) for ids in prompts
            ]
        return self._student.generate(
            prompts,
            settings or self._settings,
            seed=seed,
            keep_topk=self._keep_topk,
            keep_entropies=self._keep_entropies,
        )

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        parameters = dict(self._student.model.named_parameters())
        for name, values in weights.items():
            parameters[name].copy_(torch.tensor(values))
        self._student.weights_changed()
