"""The student is sometimes right: on-policy distillation needs correct samples to build on."""

from collections.abc import AsyncIterator

from mopd_trainer.config.evaluation import EvaluationSetConfig
from mopd_trainer.diagnostics.case import Case
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.evaluation.models import StudentModel
from mopd_trainer.evaluation.results import evaluate_set
from mopd_trainer.evaluation.sets import EvaluationSet, read_sets
from mopd_trainer.rollouts.transformers_sampler import Sampler

_PROMPTS, _SAMPLES = 32, 4
#: Sampled accuracy below which corrections save steps.
_WEAK = 0.5


async def check_learnability(case: Case) -> AsyncIterator[Finding]:
    """Yield a finding: the sampled accuracy is above 0 on some evaluation set.

    Raises:
        MopdError: when a set cannot be loaded.
    """
    name = "learnability"
    sets = [each for each in read_sets(case.config.evaluation) if each.grade is not None]
    if not sets:
        fix = "Add an evaluation section."
        yield Finding(name, "warning", "no evaluation set with a grader; not measured.", fix)
        return
    rollout = case.config.rollout.model_copy(update={"max_staleness": 0})
    model = StudentModel(case.student, Sampler(case.student, rollout, seed=0))
    shares: dict[str, float] = {}
    for each in sets:
        config: EvaluationSetConfig = each.config.model_copy(
            update={"greedy": False, "samples": _SAMPLES}
        )
        part = EvaluationSet.of(
            each.name, config, each.prompts[:_PROMPTS], each.references[:_PROMPTS]
        )
        result = await evaluate_set(model, part, rollout, seed=case.config.seed)
        shares[each.name] = result.metrics()["sampled_accuracy"]
    listing = ", ".join(f"{key} {value:.1%}" for key, value in shares.items())
    text = f"sampled accuracy before training, {_SAMPLES} samples of {_PROMPTS} prompts: {listing}."
    if 0 < min(shares.values()) < _WEAK and not rollout.corrections:
        text += f" Below {_WEAK:.0%}, rollout.corrections: 1 saves steps."
    fix = "Train on reference answers first (data.source: answers): no sample is correct."
    status = "ok" if any(shares.values()) else "failed"
    numbers = {f"{key}_accuracy": value for key, value in shares.items()}
    yield Finding(name, status, text, fix, numbers)
