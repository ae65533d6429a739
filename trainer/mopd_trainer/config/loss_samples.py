"""Requirements of losses on samples: temperature, staleness, corrections."""

from mopd_losses.config import ON_SAMPLES, K2Config, K3Config, PolicyGradientConfig
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.config.settings import invalid
from mopd_trainer.config.teacher import TeacherConfig


def require_valid_samples(
    name: str,
    teacher: TeacherConfig,
    rollout: RolloutConfig,
    *,
    sampled: bool,
    references: bool,
    source: str,
) -> None:
    """Check that the loss of a teacher is valid for the sampling settings.

    Args:
        sampled: the student samples completions.
        references: teachers score reference answers.
        source: ``data.source``.

    Raises:
        ConfigError: the loss requires other samples.
    """
    key, loss = f"teachers.{name}.loss", f"'{teacher.loss.type}'"
    if isinstance(teacher.loss, K2Config | K3Config):
        _require_unmodified_samples(key, loss, rollout, sampled=sampled)
    greedy = sampled and rollout.temperature == 0
    sampled_only = teacher.control == "constant_negative"
    if sampled_only and (greedy or references):
        raise invalid(
            f"teachers.{name}.control",
            "'constant_negative' requires samples of the student above temperature 0 "
            f"(found rollout.temperature {rollout.temperature:g}, data.source '{source}')",
        )
    if greedy and isinstance(teacher.loss, PolicyGradientConfig):
        raise invalid(
            key,
            f"{loss} has no importance weights for greedy samples (found "
            "rollout.temperature 0). Use a temperature above 0.",
        )
    if rollout.corrections and (sampled_only or isinstance(teacher.loss, ON_SAMPLES)):
        raise invalid(
            f"teachers.{name}.control" if sampled_only else key,
            f"corrected tokens are not samples of the student, which "
            f"{'this control arm' if sampled_only else loss} requires (found "
            f"rollout.corrections {rollout.corrections}, expected 0). Set it to 0, or use "
            "another loss.",
        )
    if references and isinstance(teacher.loss, ON_SAMPLES):
        raise invalid(
            key,
            f"{loss} requires samples of the student, but reference answers are scored "
            "too. Use another loss, or set student.distill_loss_weight to 0 or "
            "data.source to 'rollout'.",
        )


def _require_unmodified_samples(
    key: str, loss: str, rollout: RolloutConfig, *, sampled: bool
) -> None:
    """Check that samples are of the current weights and of the unmodified distribution."""
    if rollout.max_staleness:
        raise invalid(
            key,
            f"{loss} requires samples of the current weights (found "
            f"rollout.max_staleness {rollout.max_staleness}, expected 0). Set it to 0, or "
            "use 'policy_gradient', which corrects for stale samples.",
        )
    if sampled and (rollout.temperature != 1 or rollout.top_p != 1):
        raise invalid(
            key,
            f"{loss} requires samples of the unmodified distribution (found "
            f"rollout.temperature {rollout.temperature:g} and rollout.top_p "
            f"{rollout.top_p:g}, expected 1). Set both to 1, or use 'policy_gradient', "
            "which uses importance weights.",
        )
