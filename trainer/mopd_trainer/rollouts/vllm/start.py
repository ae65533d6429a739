"""Starts vLLM to write for a student, where it can be imported."""

from typing import TYPE_CHECKING

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.vllm_environment import prepare_environment
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import student_topk
from mopd_trainer.rollouts.vllm.weight_sync import weight_push
from mopd_trainer.student.student import Student

if TYPE_CHECKING:
    from mopd_trainer.rollouts.vllm.engine import VllmGeneration


def started_vllm(config: RunConfig, student: Student) -> "VllmGeneration":
    """Takes as long as vLLM takes; the caller closes it.

    Raises:
        ConfigError: when there is no vLLM, or it cannot load the student.
    """
    prepare_environment()
    try:
        from mopd_trainer.rollouts.vllm.engine import VllmGeneration
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine 'vllm' needs vLLM, which cannot be imported here ({error}); install "
            "mopd[vllm], or take rollout.engine 'transformers'"
        ) from error
    push = weight_push(config.student, config.rollout.vllm.weights_folder)
    keep_topk = student_topk(config.scoring_teachers)
    return VllmGeneration(student, config.student, config.rollout, push, keep_topk=keep_topk)
