"""``GenerationEngine``, the protocol of rollout engines, and ``ENGINES``, the table of them.

An engine batches concurrent requests. ``rollout.engine`` 'transformers' has no row: the student
generates in fixed batches (``transformers_sampler``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mopd_protocol.errors import MissingPackageError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_trainer.config.run import RolloutConfig, RunConfig

if TYPE_CHECKING:
    from mopd_trainer.student.generation import Generation
    from mopd_trainer.student.student import Student


class GenerationEngine(Protocol):
    """Sample with the weights that were pushed last."""

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, settings: RolloutConfig | None = None
    ) -> "Generation":
        """Return one completion; a function of prompt, seed, settings and weights.

        Args:
            settings: default: those of the run.
        """
        ...

    async def push_weights(self) -> None:
        """Load the student's current weights; no request may be in flight."""
        ...

    def close(self) -> None:
        """Free the engine's processes and memory; may be called twice."""
        ...


@dataclass(frozen=True)
class Engine:
    """A row of ``ENGINES``."""

    start: "Callable[[RunConfig, Student], GenerationEngine]"
    """Start the engine for a student; may take minutes; the caller closes it."""
    concurrency: Callable[[RolloutConfig], int]
    """Requests that one engine batches at once."""
    devices: Callable[[RolloutConfig], int]
    """Devices of one engine."""


def _start_vllm(config: RunConfig, student: "Student") -> GenerationEngine:
    """Start vLLM.

    Raises:
        ConfigError: when vLLM is not installed, or cannot load the student.
    """
    prepare_environment()
    try:
        from mopd_trainer.rollouts.vllm.engine import VllmEngine
    except ImportError as error:
        raise MissingPackageError(
            f"rollout.engine: 'vllm' needs vLLM, which cannot be imported ({error}). Run pip "
            "install '.[vllm]', or set it to 'transformers'.",
            key="vllm",
        ) from error
    from mopd_trainer.rollouts.vllm.weight_sync import weight_push

    push = weight_push(config.student, config.rollout.vllm.weights_folder)
    return VllmEngine(
        student,
        config.student,
        config.rollout,
        push,
        keep_topk=config.kept_topk,
        keep_entropies=config.tokens.keeps_entropies,
    )


#: ``rollout.engine`` -> engine.
ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        start=_start_vllm,
        concurrency=lambda rollout: rollout.vllm.max_num_seqs,
        devices=lambda rollout: rollout.vllm.tensor_parallel_size,
    ),
}


def configured_engine(rollout: RolloutConfig) -> Engine | None:
    """Return the row of ``rollout.engine``; None for 'transformers'."""
    return None if rollout.engine == "transformers" else ENGINES[rollout.engine]


def worker_concurrency(rollout: RolloutConfig) -> int:
    """Return the calls that one rollout worker runs at once."""
    engine = configured_engine(rollout)
    return 1 if engine is None else engine.concurrency(rollout)


def worker_devices(rollout: RolloutConfig) -> int:
    """Return the devices of one rollout worker."""
    engine = configured_engine(rollout)
    return 1 if engine is None else engine.devices(rollout)
