"""Settings of a teacher that cannot work are rejected before a run starts."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from mopd_client.services.kinds import SERVICE_KINDS
from mopd_protocol.errors import ConfigError
from mopd_trainer.config.loading import parse_run
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.connect import teacher_pool
from tests.trainer.runs import run_values

STOCK = {"kind": "openai", "tokenizer": "folder"}


def teacher(**settings: Any) -> TeacherConfig:
    return TeacherConfig.model_validate({"url": "http://a", **settings})


def run_with(**on_error: str) -> RunConfig:
    teachers = {name: {"url": "http://a", "on_error": policy} for name, policy in on_error.items()}
    return parse_run(run_values(Path("."), teachers=teachers), source="run")


def test_every_kind_of_service_has_a_row_in_the_table() -> None:
    kinds = {*get_args(TeacherConfig.model_fields["kind"].annotation)} - {"self"}
    assert kinds == SERVICE_KINDS.keys()
    for kind in SERVICE_KINDS.values():
        assert kind.create("folder", None, None).path.startswith("/v1/")


@pytest.mark.parametrize(
    ("loss", "sends_token_ids"),
    [
        ({"type": "topk_kl"}, True),
        ({"type": "policy_gradient", "baseline": "top_k"}, True),
        ({"type": "policy_gradient"}, False),
        ({"type": "prefix_kl"}, False),
    ],
)
def test_losses_on_the_students_own_ids_send_them(
    loss: dict[str, str], sends_token_ids: bool
) -> None:
    assert teacher(loss=loss).sends_token_ids == sends_token_ids


@pytest.mark.parametrize("policy", ["fail", "drop", "wait", "fallback:math"])
def test_error_policies(policy: str) -> None:
    assert teacher(on_error=policy).on_error == policy
    assert teacher(on_error=policy).fallback == ("math" if ":" in policy else None)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        *(({"on_error": p}, "on_error") for p in ("", "ignore", "fallback", "fallback:", "Drop")),
        ({"tokenizer": "x"}, "tokenizer"),
        ({"kind": "openai"}, "tokenizer"),
        ({**STOCK, "temperature": 0.5}, "temperature"),
        ({"support": "student_topk", "loss": {"type": "alm"}}, "support"),
        ({"loss": "pkl_parity"}, "loss.type"),
        ({"loss": {"type": "hkl", "most_ranks": 8}}, "loss.type"),
        ({"support": "full", "loss": {"type": "topk_kl"}}, "support"),
        ({"placement": "ray"}, "serve"),
        ({"serve": {"model": "x"}}, "serve"),
    ],
)
def test_invalid_settings_name_the_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        teacher(**settings)
    (problem,) = caught.value.errors()
    assert problem["ctx"]["error"].key == key


def test_fallbacks_may_form_a_finite_chain() -> None:
    config = run_with(math="fallback:code", code="fallback:general", general="wait")
    assert config.teachers["math"].fallback == "code"


@pytest.mark.parametrize(
    ("policies", "teacher_name", "chain"),
    [
        ({"math": "fallback:physics", "code": "drop"}, "math", "code, math"),
        ({"math": "fallback:math"}, "math", "(math -> math)"),
        (
            {"math": "fallback:code", "code": "fallback:math"},
            "math",
            "(math -> code -> math)",
        ),
        (
            {"a": "fallback:b", "b": "fallback:c", "c": "fallback:b"},
            "a",
            "(a -> b -> c -> b)",
        ),
    ],
)
def test_fallbacks_to_unknown_teachers_and_cycles_are_rejected(
    policies: dict[str, str], teacher_name: str, chain: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_with(**policies)
    assert caught.value.key == f"teachers.{teacher_name}.on_error"
    assert chain in str(caught.value)


def test_score_cache_needs_a_revision_of_a_stock_server(tmp_path: Path) -> None:
    settings = {"url": "http://a", **STOCK}
    values = run_values(tmp_path, score_cache=str(tmp_path), teachers={"math": settings})
    with pytest.raises(ConfigError) as caught:
        parse_run(values, source="run")
    assert caught.value.key == "teachers.math.revision"
    settings["revision"] = "step 900"
    assert parse_run(values, source="run").teachers["math"].revision == "step 900"


def test_score_cache_may_be_set_by_its_path(tmp_path: Path) -> None:
    for value in (str(tmp_path), {"path": str(tmp_path)}):
        config = RunConfig.model_validate(run_values(tmp_path, score_cache=value))
        assert config.score_cache is not None
        assert (config.score_cache.path, config.score_cache.max_gigabytes) == (tmp_path, 64.0)
    assert RunConfig.model_validate(run_values(tmp_path)).score_cache is None


def test_score_cache_is_created_only_if_set(tmp_path: Path) -> None:
    config = RunConfig.model_validate(run_values(tmp_path, score_cache=str(tmp_path / "scores")))
    teacher_pool(config.teachers)
    assert not (tmp_path / "scores").exists()
    teacher_pool(config.teachers, config.score_cache)
    assert (tmp_path / "scores").is_dir()
