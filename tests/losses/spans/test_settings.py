"""Settings of the losses on spans: names, defaults, and what is refused."""

import pytest
from pydantic import BaseModel, ValidationError

from mopd_losses import config
from mopd_losses.config import CtkdConfig, GoldConfig

NAMES = {
    "gold": config.GoldConfig,
    "uld": config.UldConfig,
    "alm": config.AlmConfig,
    "simct": config.SimctConfig,
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_settings_are_named_frozen_and_know_their_keys(name: str, kind: type[BaseModel]) -> None:
    assert kind().model_dump()["type"] == name
    with pytest.raises(ValidationError):
        kind.model_validate({"typo": 1})
    with pytest.raises(ValidationError):
        kind().type = "other"  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight", ["matched_weight", "unmatched_weight"])
def test_one_weight_without_the_other_is_refused(weight: str) -> None:
    with pytest.raises(ValidationError, match="set both, or neither"):
        GoldConfig.model_validate({weight: 0.5})
    GoldConfig(matched_weight=0.5, unmatched_weight=0.0)


def test_ctkd_compares_first_rows_by_default() -> None:
    assert CtkdConfig().span_rows == "first"
    assert CtkdConfig(span_rows="pooled").span_rows == "pooled"
