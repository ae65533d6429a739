"""The settings that are not part of a run's fingerprint are the ones marked ``Incidental``."""

import inspect
import typing
from collections.abc import Iterator

from pydantic import BaseModel

from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.settings import IncidentalMark

#: A setting that is added or removed here changes which runs can be resumed.
INCIDENTAL = """
accept_changed_settings accept_changed_teachers best_checkpoint_metric best_checkpoint_mode
data.answer_key data.default_teacher data.ignored_keys data.on_bad_line data.prompts
data.question_key data.split data.subset data.teacher_key data.turns
degradation evaluation exp_name keep_checkpoints logging logging_steps output_dir
projection_cache resources resume_from_checkpoint rollout.agent.timeout_seconds
rollout.scoring rollout.vllm save_steps
score_cache stop_on_degradation student.attn_implementation student.device student.final_dtype
student.gradient_checkpointing student.max_skipped_in_a_row student.model student.on_nonfinite
student.packing student.push_to_hub student.revision student.rows_per_block student.sharding
student.skip_grad_norm_above student.tokens_per_micro_batch student.trust_remote_code
teacher_wait_seconds teachers.api_key_env teachers.ca_file
teachers.deadline_seconds teachers.device teachers.dtype teachers.max_concurrency teachers.model
teachers.on_error
teachers.placement teachers.require_all_replicas teachers.revision teachers.scores
teachers.serve teachers.timeout_seconds teachers.tokenizer teachers.url teachers.verify
"""


def models(annotation: object) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models(part)]


def incidental(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if any(isinstance(mark, IncidentalMark) for mark in field.metadata):
            yield prefix + name
        else:
            for section in models(field.annotation):
                yield from incidental(section, f"{prefix}{name}.")


def test_incidental_settings_are_pinned() -> None:
    assert sorted(incidental(RunConfig)) == INCIDENTAL.split()
