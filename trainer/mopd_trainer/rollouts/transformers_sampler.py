"""Rollouts in this process: the student generates one batch at a time with transformers."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import torch

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.prompt_encoder import PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student


class Sampler:
    """Sample completions with transformers: a ``CompletionSource``.

    Completions are a function of the seed, the step, the batch number and the weights, so that a
    resumed run samples what the uninterrupted run would have sampled.

    With ``max_staleness`` a copy of the student samples, which keeps its weights while the student
    is trained. The copy needs the memory of the trained weights (4 bytes a parameter) on the same
    device.

    Args:
        keep_topk: most likely ids of the student to keep at each token, for its teachers.
        keep_entropies: keep the entropies of the distributions that are sampled from.
        version: steps behind the student's weights.
    """

    def __init__(
        self,
        student: Student,
        config: RolloutConfig,
        *,
        seed: int,
        keep_topk: int = 0,
        keep_entropies: bool = False,
        version: int = 0,
    ) -> None:
        self._trained = student
        self._student = student.copy() if config.max_staleness else student
        if self._student is not student:
            self._student.model.requires_grad_(False)
        self._encoder = PromptEncoder(student, config)
        self._keep_topk = keep_topk
        self._keep_entropies = keep_entropies
        self._config = config
        self._seed = seed
        self._version = version
        self._lock = asyncio.Lock()  # locked while a batch is sampled or weights are pushed

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: each prompt ``samples_per_prompt`` times, batch by batch."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        size = self._config.generation_batch_size
        for batch, place in enumerate(range(0, len(repeated), size)):
            part = repeated[place : place + size]
            async with self._lock:
                rollouts = await asyncio.to_thread(self.sample_batch, part, step=step, batch=batch)
            yield CompletionBatch(place, rollouts)

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        """See ``CompletionGenerator``: batch by batch."""
        size = settings.generation_batch_size
        generations: list[Generation] = []
        for place in range(0, len(prompts), size):
            async with self._lock:
                generations += await asyncio.to_thread(
                    self._student.generate,
                    prompts[place : place + size],
                    settings,
                    seed=derived_seed(seed, place),
                    keep_topk=self._keep_topk,
                    keep_entropies=self._keep_entropies,
                )
        return generations

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``."""
        async with self._lock:
            await asyncio.to_thread(self._copy_weights)
            self._version = version

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._encoder.pop_dropped()

    def sample_batch(self, prompts: Sequence[Prompt], *, step: int, batch: int) -> list[Rollout]:
        """Return one rollout per prompt that leaves room for a completion; count the others."""
        first = batch * self._config.generation_batch_size
        encoded = self._encoder.encode(prompts, first=first)
        if not encoded:
            return []
        generations = self._student.generate(
            [prompt.token_ids for prompt in encoded],
            self._config,
            seed=derived_seed(self._seed, step, batch),
            keep_topk=self._keep_topk,
            keep_entropies=self._keep_entropies,
        )
        return [
            self._encoder.rollout(prompt, generation, version=self._version)
            for prompt, generation in zip(encoded, generations, strict=True)
        ]

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copy the trained weights; nothing may train or sample meanwhile."""
        if self._student is self._trained:
            return
        trained = self._trained.full_model().state_dict()
        for name, weight in self._student.model.state_dict().items():
            if weight.data_ptr() != trained[name].data_ptr():  # frozen weights are shared
                weight.copy_(trained[name])
