"""Trainer of mopd: on-policy distillation of a student from several teachers."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_trainer.api import check, doctor, evaluate, report, train
    from mopd_trainer.collection import collect
    from mopd_trainer.config.degradation import DegradationConfig
    from mopd_trainer.config.evaluation import EvaluationConfig, EvaluationSetConfig
    from mopd_trainer.config.loading import load_run
    from mopd_trainer.config.rollout import RolloutConfig
    from mopd_trainer.config.run import RunConfig
    from mopd_trainer.config.settings import ImportanceConfig
    from mopd_trainer.config.student import StudentConfig
    from mopd_trainer.config.teacher import TeacherConfig
    from mopd_trainer.corrections import Corrector
    from mopd_trainer.data.examples import TrainingExample
    from mopd_trainer.data.importance import ImportanceWeights
    from mopd_trainer.data.packing import MicroBatch, TeacherPart, micro_batch, pack
    from mopd_trainer.data.prompts import PromptOrder
    from mopd_trainer.data.teacher_input import text_view
    from mopd_trainer.evaluation.models import StudentModel
    from mopd_trainer.evaluation.results import evaluate_set
    from mopd_trainer.evaluation.sets import EvaluationSet
    from mopd_trainer.inspection.alignment import align
    from mopd_trainer.inspection.equal_belief import equal_belief
    from mopd_trainer.metrics.samples import sample_metrics
    from mopd_trainer.metrics.table import metric_rows
    from mopd_trainer.rollouts.agents.sampler import AgentClient, AgentSampler
    from mopd_trainer.rollouts.transformers_sampler import Sampler
    from mopd_trainer.student.identity import StudentIdentity
    from mopd_trainer.student.student import Student
    from mopd_trainer.teachers.connect import Teacher, connect_teachers, teacher_pool
    from mopd_trainer.teachers.scoring import RolloutScorer
    from mopd_trainer.training.degradation import DegradationMonitor
    from mopd_trainer.training.learner import Learner
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "AgentClient",
    "AgentSampler",
    "Corrector",
    "DegradationConfig",
    "DegradationMonitor",
    "EvaluationConfig",
    "EvaluationSet",
    "EvaluationSetConfig",
    "ImportanceConfig",
    "ImportanceWeights",
    "Learner",
    "MicroBatch",
    "PromptOrder",
    "RolloutConfig",
    "RolloutScorer",
    "RunConfig",
    "Sampler",
    "Student",
    "StudentConfig",
    "StudentIdentity",
    "StudentModel",
    "Teacher",
    "TeacherConfig",
    "TeacherPart",
    "TrainingExample",
    "align",
    "check",
    "collect",
    "connect_teachers",
    "doctor",
    "equal_belief",
    "evaluate",
    "evaluate_set",
    "load_run",
    "metric_rows",
    "micro_batch",
    "pack",
    "report",
    "sample_metrics",
    "teacher_pool",
    "text_view",
    "train",
]
