"""Which completion source a run's settings ask for."""

from mopd_trainer.answers import AnswerReader
from mopd_trainer.completion_source import CompletionSource, Mixture
from mopd_trainer.config import RunConfig
from mopd_trainer.rollouts import Sampler
from mopd_trainer.student import Student
from mopd_trainer.teacher_config import student_topk


def chosen_source(config: RunConfig, student: Student) -> CompletionSource:
    """The student itself, the data's reference answers, or both."""
    share = config.data.rollout_share
    rollouts = Sampler(
        student, config.rollout, seed=config.seed, keep_topk=student_topk(config.judges)
    )
    answers = AnswerReader(
        student.identity,
        config.rollout,
        max_length=student.max_length,
        judged=config.judges_answers,
    )
    if share == 1:
        return rollouts
    if share == 0:
        return answers
    return Mixture(rollouts, answers, rollout_share=share, seed=config.seed)
