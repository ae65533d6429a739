"""Defaults of the same-vocabulary losses, and errors for invalid settings."""

import pytest
from pydantic import BaseModel, ValidationError

from mopd_losses.config import (
    CtkdConfig,
    DivergenceSettings,
    K2Config,
    K3Config,
    PolicyGradientConfig,
    TopKDivergenceSettings,
    TopKKlConfig,
)


def test_top_k_losses_are_forward_kl_with_a_tail_bucket_by_default() -> None:
    for kind in (CtkdConfig, TopKKlConfig):
        settings = kind()
        assert (settings.divergence, settings.form) == ("forward_kl", "tail_bucket")
        assert settings.kd_temperature is None


def test_resolved_settings_can_be_read_back() -> None:
    for settings in (
        CtkdConfig(divergence="skewed_reverse_kl", skew=0.3, form="renormalised"),
        TopKKlConfig(divergence="jsd", teacher_weight=0.2, kd_temperature=2),
        PolicyGradientConfig(max_ratio=5),
        K2Config(),
        K3Config(),
    ):
        assert type(settings).model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"divergence": "tvd", "skew": 0.2},
            "skew is set, but divergence 'tvd' does not read it; it belongs to "
            "skewed_forward_kl and skewed_reverse_kl",
        ),
        ({"teacher_weight": 0.2}, "it belongs to jsd"),
        ({"divergence": "jsd", "tail_mass": 0.2}, "it belongs to adaptive_kl"),
        ({"entropy_threshold": 0.2}, "it belongs to entropy_aware_kl"),
        ({"divergence": "entropy_aware_kl", "entropy_threshold": -1}, "greater than or equal to 0"),
        ({"divergence": "jsd", "form": "generalised"}, "use form 'tail_bucket'"),
        ({"divergence": "jsd", "teacher_weight": 1.1}, "less than or equal to 1"),
        ({"divergence": "adaptive_kl", "tail_mass": 0}, "greater than 0"),
        ({"divergence": "skewed_forward_kl", "skew": 1}, "less than 1"),
        ({"kd_temperature": 0}, "greater than 0"),
        ({"divergence": "kl"}, "Input should be"),
        ({"form": "raw"}, "Input should be"),
        ({"beta": 0.5}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    values: dict[str, object], sentence: str
) -> None:
    for kind in (TopKDivergenceSettings, CtkdConfig, TopKKlConfig):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(values)
        assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (PolicyGradientConfig, {"max_ratio": 0}),
        (K2Config, {"max_ratio": 1}),
        (K3Config, {"max_ratio": 1}),
    ],
)
def test_settings_out_of_range_are_refused(
    kind: type[BaseModel], values: dict[str, object]
) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(values)


def test_settings_are_frozen() -> None:
    for settings in (CtkdConfig(), PolicyGradientConfig(), K2Config(), K3Config()):
        with pytest.raises(ValidationError):
            settings.type = "other"  # type: ignore[assignment]


def test_which_divergences_need_a_floor_under_the_teacher() -> None:
    unbounded = [
        DivergenceSettings(divergence="reverse_kl"),
        DivergenceSettings(divergence="adaptive_kl"),
        DivergenceSettings(divergence="entropy_aware_kl"),
        DivergenceSettings(divergence="jsd", teacher_weight=1),
        DivergenceSettings(divergence="skewed_reverse_kl", skew=0),
    ]
    bounded = [
        DivergenceSettings(divergence="forward_kl"),
        DivergenceSettings(divergence="jsd", teacher_weight=0),
        DivergenceSettings(divergence="jsd"),
        DivergenceSettings(divergence="skewed_reverse_kl"),
        DivergenceSettings(divergence="skewed_forward_kl", skew=0),
        DivergenceSettings(divergence="tvd"),
    ]
    assert all(settings.unbounded_where_teacher_vanishes for settings in unbounded)
    assert not any(settings.unbounded_where_teacher_vanishes for settings in bounded)
