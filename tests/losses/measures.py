"""Every divergence with some parameters, ready to be compared with its slow twin."""

from mopd_losses.config import DivergenceSettings, TopKDivergenceSettings
from tests.reference import divergences as reference

#: All eight; no parameter has a value that weights both sides equally.
MEASURES = (
    DivergenceSettings(divergence="forward_kl"),
    DivergenceSettings(divergence="reverse_kl"),
    DivergenceSettings(divergence="jsd", teacher_weight=0.1),
    DivergenceSettings(divergence="adaptive_kl", tail_mass=0.45),
    DivergenceSettings(divergence="skewed_forward_kl"),
    DivergenceSettings(divergence="skewed_reverse_kl", skew=0.3),
    DivergenceSettings(divergence="tvd"),
    # About half of the random teachers in the tests have more entropy.
    DivergenceSettings(divergence="entropy_aware_kl", entropy_threshold=1.0),
)

#: Those that are finite for any two distributions.
BOUNDED = tuple(
    m
    for m in MEASURES
    if m.divergence not in ("forward_kl", "reverse_kl", "adaptive_kl", "entropy_aware_kl")
)

#: Those that coarse-graining cannot raise.
F_DIVERGENCES = tuple(s for s in MEASURES if s.divergence != "adaptive_kl")

#: Every form of every divergence that has it.
TRUNCATED = tuple(
    TopKDivergenceSettings(**settings.model_dump(), form=form)
    for settings in MEASURES
    for form in ("renormalised", "tail_bucket")
) + tuple(
    TopKDivergenceSettings(divergence=divergence, form="generalised")
    for divergence in ("forward_kl", "reverse_kl")
)


def name_of(settings: DivergenceSettings) -> str:
    """For the names of tests."""
    changed = settings.model_dump(exclude_defaults=True, exclude={"divergence"})
    return "-".join(map(str, [settings.divergence, *changed.values()]))


def slow(settings: DivergenceSettings) -> reference.Divergence:
    """The slow twin."""
    return reference.divergence_named(
        settings.divergence,
        teacher_weight=settings.teacher_weight,
        tail_mass=settings.tail_mass,
        skew=settings.skew,
        entropy_threshold=settings.entropy_threshold,
    )
