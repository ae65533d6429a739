"""A teacher's settings that cannot work are refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.teachers.connect import teacher_pool
from tests.trainer.runs import run_values


def teacher(**settings: Any) -> TeacherConfig:
    return TeacherConfig.model_validate({"url": "http://a", **settings})


def run_with(**on_error: str) -> RunConfig:
    """A run whose teachers have these policies."""
    teachers = {name: {"url": "http://a", "on_error": policy} for name, policy in on_error.items()}
    return RunConfig.model_validate(run_values(Path("."), teachers=teachers))


@pytest.mark.parametrize("policy", ["fail", "drop", "wait", "fallback:math"])
def test_policies_are_taken(policy: str) -> None:
    assert teacher(on_error=policy).on_error == policy
    assert teacher(on_error=policy).fallback == ("math" if ":" in policy else None)


@pytest.mark.parametrize("policy", ["", "ignore", "fallback", "fallback:", "Drop"])
def test_a_policy_that_is_none_is_refused(policy: str) -> None:
    with pytest.raises(ValidationError, match="expected fail, drop, wait or fallback:<teacher>"):
        teacher(on_error=policy)


def test_fallbacks_may_form_a_chain_that_ends() -> None:
    config = run_with(math="fallback:code", code="fallback:general", general="wait")
    assert config.teachers["math"].fallback == "code"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"math": "fallback:physics", "code": "drop"},
            "teacher 'math' falls back to 'physics'; known teachers are code, math",
        ),
        ({"math": "fallback:math"}, r"'math' falls back to itself \(math -> math\)"),
        (
            {"math": "fallback:code", "code": "fallback:math"},
            r"'math' falls back to itself \(math -> code -> math\)",
        ),
        (
            {"a": "fallback:b", "b": "fallback:c", "c": "fallback:b"},
            r"falls back to itself \(a -> b -> c -> b\)",
        ),
    ],
)
def test_fallbacks_that_lead_nowhere_are_refused(policies: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_with(**policies)


def test_there_is_one_way_to_hedge() -> None:
    with pytest.raises(ValidationError, match="are both set; expected one of them"):
        teacher(hedge_after_seconds=1.0, hedge_after_quantile=0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "x"}, "tokenizer given, but a mopd service tells that itself"),
        ({"model": "x", "revision": "y"}, "model and revision given, but a mopd service"),
        ({"api": "generate"}, "api given, but a mopd service tells that itself"),
        ({"kind": "openai"}, "kind 'openai' without a tokenizer; set it to the folder"),
        (
            {"kind": "openai", "tokenizer": "x", "temperature": 0.5},
            "temperature is 0.5, but a stock vLLM server scores at 1 only",
        ),
        ({"kind": "grpc"}, "Input should be 'mopd' or 'openai'"),
    ],
)
def test_settings_of_another_kind_of_server_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        teacher(**settings)


def test_scores_of_weights_without_a_name_are_not_kept(tmp_path: Path) -> None:
    stock = {"url": "http://a", "kind": "openai", "tokenizer": "folder"}
    values = run_values(tmp_path, score_cache=str(tmp_path), teachers={"math": stock})
    with pytest.raises(ValidationError, match="'math' is a stock vLLM server, which does not tell"):
        RunConfig.model_validate(values)
    stock["revision"] = "step 900"
    config = RunConfig.model_validate(values)
    assert config.teachers["math"].revision == "step 900"


def test_a_score_cache_may_be_given_by_its_path_alone(tmp_path: Path) -> None:
    for given in (str(tmp_path), {"path": str(tmp_path)}):
        config = RunConfig.model_validate(run_values(tmp_path, score_cache=given))
        assert config.score_cache is not None
        assert (config.score_cache.path, config.score_cache.max_gigabytes) == (tmp_path, 64.0)
    assert RunConfig.model_validate(run_values(tmp_path)).score_cache is None


def test_no_cache_is_made_unless_asked_for(tmp_path: Path) -> None:
    config = RunConfig.model_validate(run_values(tmp_path, score_cache=str(tmp_path / "scores")))
    teacher_pool(config.teachers)
    assert not (tmp_path / "scores").exists()
    teacher_pool(config.teachers, config.score_cache)
    assert (tmp_path / "scores").is_dir()
