"""Run files: every invalid setting is reported by its key, and resolved settings load again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.loading import load_run, write_resolved
from mopd_trainer.config.run import LoraConfig, RunConfig
from tests.trainer.runs import run_values, write_run

Change = Callable[[dict[str, Any]], object]


def load_error(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return caught.value


def code_loss(v: dict[str, Any], loss: str) -> None:
    v["teachers"]["code"].update(loss={"type": loss})


CHANGES: list[tuple[Change, str]] = [
    (lambda v: v.update(max_step=3), "max_step"),
    (lambda v: v["student"].update(lora={"r": 8}), "student.lora.r"),
    (lambda v: v["student"].update(lora={"target_modules": []}), "student.lora.target_modules"),
    (lambda v: v["teachers"]["math"].update(topk=3), "teachers.math.topk"),
    (lambda v: v["teachers"]["math"].update(loss={"type": "mse"}), "teachers.math.loss"),
    (lambda v: v["teachers"]["math"].update(url=[]), "teachers.math.url"),
    (lambda v: v["teachers"]["math"].update(tokenizer="m"), "teachers.math.tokenizer"),
    (
        lambda v: v["teachers"]["math"].update(teacher_temperature=0.5, loss={"type": "gold"}),
        "teachers.math.teacher_temperature",
    ),
    (
        lambda v: v["student"].update(chat_template_kwargs={"tokenize": True}),
        "student.chat_template_kwargs",
    ),
    (
        lambda v: v["teachers"]["math"].update(chat_template_kwargs={"self": 1}),
        "teachers.math.chat_template_kwargs",
    ),
    (lambda v: v["data"].update(subset="main"), "data.subset"),
    (lambda v: v.update(resources={"student": 2}), "student.sharding"),
    (lambda v: v.pop("output_dir"), "output_dir"),
    (lambda v: v["rollout"].pop("max_new_tokens"), "rollout.max_new_tokens"),
    (lambda v: v.update(max_steps="many"), "max_steps"),
    (lambda v: v.update(max_steps=0), "max_steps"),
    (lambda v: v["student"].update(learning_rate=-1), "student.learning_rate"),
    (lambda v: v["student"].update(distill_loss_weight=0.5), "student.distill_loss_weight"),
    (lambda v: v["student"].update(distill_loss_weight=1.5), "student.distill_loss_weight"),
    (lambda v: v["data"].update(on_policy_fraction=0), "data.on_policy_fraction"),
    (
        lambda v: v["data"].update(source="answers", on_policy_fraction=1.0),
        "data.on_policy_fraction",
    ),
    (lambda v: v["data"].update(default_teacher="maths"), "data.default_teacher"),
    (
        lambda v: v["rollout"].update(temperature=0, samples_per_prompt=4),
        "rollout.temperature",
    ),
    (lambda v: v["rollout"].update(on_stale="drop"), "rollout.on_stale"),
    (
        lambda v: (
            v["rollout"].update(engine="vllm", top_p=0.9),
            v["teachers"]["code"].update(support="student_topk"),
        ),
        "teachers.code.support",
    ),
    (lambda v: v.update(teachers={}), "teachers"),
    (lambda v: (v["data"].update(source="answers"), v.update(teachers={})), "teachers"),
    (
        lambda v: (
            v["data"].update(on_policy_fraction=0.5),
            v["student"].update(distill_loss_weight=0),
            v.update(teachers={}),
        ),
        "teachers",
    ),
    *(
        (
            lambda v, section=section, change=change, loss=loss: (
                v[section].update(change),
                code_loss(v, loss),
            ),
            "teachers.code.loss",
        )
        for section, change, losses in (
            ("data", {"source": "answers"}, ("policy_gradient", "k2", "k3")),
            ("data", {"on_policy_fraction": 0.9}, ("policy_gradient", "k2", "k3")),
            ("rollout", {"temperature": 0.7}, ("k2", "k3")),
            ("rollout", {"top_p": 0.9}, ("k2", "k3")),
            ("rollout", {"temperature": 0}, ("policy_gradient", "k2", "k3")),
            ("rollout", {"max_staleness": 2}, ("k2", "k3")),
            ("rollout", {"corrections": 1}, ("policy_gradient", "k2", "k3")),
        )
        for loss in losses
    ),
    (
        lambda v: (
            v["rollout"].update(corrections=1),
            v["teachers"]["code"].update(control="constant_negative"),
        ),
        "teachers.code.control",
    ),
    (
        lambda v: (
            v["rollout"].update(corrections=1, scoring="after_rollout"),
            v["teachers"].update(code={"placement": "local", "model": "x", "top_k": 8}),
        ),
        "teachers.code.placement",
    ),
    (lambda v: v["rollout"].update(correction_ratio=1), "rollout.correction_ratio"),
    (lambda v: v.update(replay="other", logging={"record": True}), "logging.record"),
    (
        lambda v: v["teachers"]["math"].update(placement="ray", serve={"model": "x"}),
        "teachers.math.placement",
    ),
    (
        lambda v: v.update(
            replay="other", resources={"device": "cpu", "student": 1, "rollout_workers": 2}
        ),
        "resources.rollout_workers",
    ),
]


@pytest.mark.parametrize(("change", "key"), CHANGES)
def test_invalid_setting_is_reported_by_its_key(tmp_path: Path, change: Change, key: str) -> None:
    values = run_values(tmp_path)
    change(values)
    path = write_run(tmp_path, values)
    error = load_error(path)
    assert error.key == key
    assert str(error).startswith(f"{path}: {key}: ")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "suggestion"),
    [
        (lambda v: v.update(max_step=3), "'max_steps'"),
        (lambda v: v["teachers"]["math"].update(topk=3), "'top_k'"),
        (lambda v: v["student"].update(learning_rat=1), "'learning_rate'"),
        (lambda v: v.update(top_p=0.9), "'rollout.top_p'"),
        (lambda v: v["rollout"].update(learning_rate=1), "'student.learning_rate'"),
        (lambda v: v["teachers"]["math"].update(loss={"type": "ctkd", "divergense": 1}), "'diver"),
        (lambda v: v.update(num_train_epochs=3), "'max_steps'"),
        (lambda v: v["rollout"].update(max_completion_length=3), "'rollout.max_new_tokens'"),
        (
            lambda v: v["teachers"]["math"].update(loss={"type": "topk_kl", "beta": 1}),
            "'teachers.math.loss.divergence'",
        ),
    ],
)
def test_misspelled_setting_has_a_suggestion(
    tmp_path: Path, change: Change, suggestion: str
) -> None:
    values = run_values(tmp_path)
    change(values)
    assert suggestion in str(load_error(write_run(tmp_path, values)))


def test_several_invalid_settings_are_listed(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path, speed=1, max_steps=0))
    error = load_error(path)
    assert error.key == "max_steps"
    heading, *listing = str(error).splitlines()
    assert heading.startswith(f"{path}: 2 ")
    assert [line.split(":")[0] for line in listing] == ["  max_steps", "  speed"]


@pytest.mark.parametrize(
    ("data", "weight", "share", "references", "needs_teachers"),
    [
        ({}, 1.0, 1.0, False, True),
        ({"source": "answers"}, 1.0, 0.0, True, True),
        ({"source": "answers"}, 0.3, 0.0, True, True),
        ({"source": "answers"}, 0.0, 0.0, False, False),
        ({"source": "answers", "on_policy_fraction": 0.25}, 0.3, 0.25, True, True),
        ({"source": "rollout", "on_policy_fraction": 0.25}, 0.0, 0.25, False, True),
    ],
)
def test_sources_of_completions_and_scores(
    tmp_path: Path,
    data: dict[str, Any],
    weight: float,
    share: float,
    references: bool,
    needs_teachers: bool,
) -> None:
    values = run_values(tmp_path)
    values["data"].update(data)
    values["student"]["distill_loss_weight"] = weight
    config = RunConfig.model_validate(values)
    assert config.data.rollout_share == share
    assert config.scores_reference_answers == references
    assert set(config.scoring_teachers) == ({"math", "code"} if needs_teachers else set())


def test_losses_on_samples_are_valid_if_only_samples_are_scored(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    code_loss(values, "policy_gradient")
    values["data"]["on_policy_fraction"] = 0.5
    values["student"]["distill_loss_weight"] = 0
    assert not RunConfig.model_validate(values).scores_reference_answers


@pytest.mark.parametrize("loss", ["policy_gradient", "k2", "k3"])
def test_losses_on_samples_have_importance_weights_only_if_they_are_set(
    tmp_path: Path, loss: str
) -> None:
    values = run_values(tmp_path)
    assert RunConfig.model_validate(values).importance.least_weight == 0.1
    code_loss(values, loss)
    assert RunConfig.model_validate(values).importance.least_weight == 1
    values["importance_weights"] = {"least": 0.3}
    assert RunConfig.model_validate(values).importance.least_weight == 0.3


@pytest.mark.parametrize("loss", ["policy_gradient", "k2", "k3"])
def test_losses_on_samples_sample_at_temperature_1_by_default(tmp_path: Path, loss: str) -> None:
    values = run_values(tmp_path)
    assert RunConfig.model_validate(values).rollout.temperature == 0.6
    code_loss(values, loss)
    config = RunConfig.model_validate(values)
    assert config.rollout.temperature == 1
    assert RunConfig.model_validate(config.model_dump()) == config
    values["rollout"]["temperature"] = 0.8
    code_loss(values, "policy_gradient")
    assert RunConfig.model_validate(values).rollout.temperature == 0.8


@pytest.mark.parametrize(
    ("change", "corrections"),
    [
        (lambda v: None, 1),
        (lambda v: v["rollout"].update(engine="vllm"), 0),
        (lambda v: v["rollout"].update(engine="vllm", corrections=2), 2),
        (lambda v: v["rollout"].update(scoring="after_rollout"), 0),
        (lambda v: v["teachers"]["code"].update(control="random"), 0),
        (lambda v: code_loss(v, "policy_gradient"), 0),
        (lambda v: code_loss(v, "k3"), 0),
    ],
    ids=["default", "vllm", "set", "after the rollout", "control", "policy_gradient", "k3"],
)
def test_samples_of_the_trainer_are_corrected_once_by_default(
    tmp_path: Path, change: Change, corrections: int
) -> None:
    values = run_values(tmp_path)
    change(values)
    config = RunConfig.model_validate(values)
    assert config.rollout.corrections == corrections
    assert RunConfig.model_validate(config.model_dump()) == config


def test_plain_sft_needs_no_teacher(tmp_path: Path) -> None:
    values = run_values(tmp_path, teachers={})
    values["data"]["source"] = "answers"
    values["student"]["distill_loss_weight"] = 0
    assert RunConfig.model_validate(values).scoring_teachers == {}


@pytest.mark.parametrize(
    "content",
    [
        b"max_steps: [1\n",
        b"max_steps:\n\t- 1\n",
        b"- max_steps\n",
        b"5\n",
        b"exp_name: \xff\n",
        b"exp_name: ${nobody}\n",
    ],
)
def test_file_that_is_not_a_run_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    message = str(load_error(path))
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


def test_missing_file_and_folder_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert str(load_error(path)).startswith(f"{path}: file not found")


def test_overrides_replace_settings_at_any_depth(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path))
    overrides = [
        "max_steps=7",
        "teachers.math.top_k=32",
        "teachers.code.loss.divergence=reverse_kl",
        "teachers.code.loss.type=ctkd",
        "student.betas=[0.8,0.99]",
        "resume_from_checkpoint=true",
    ]
    settings: dict[str, Any] = {
        "max_steps": 7,
        "teachers": {
            "math": {"top_k": 32},
            "code": {"loss": {"divergence": "reverse_kl", "type": "ctkd"}},
        },
        "student": {"betas": [0.8, 0.99]},
        "resume_from_checkpoint": True,
    }
    config = load_run(path, overrides)
    assert (config.max_steps, config.resume_from_checkpoint) == (7, True)
    assert (config.teachers["math"].top_k, config.teachers["code"].top_k) == (32, 8)
    assert config.teachers["code"].loss.divergence == "reverse_kl"
    assert config.student.betas == (0.8, 0.99)
    assert load_run(str(path), **settings) == config
    assert load_run(load_run(path), **settings) == config


def test_overrides_remove_settings(tmp_path: Path) -> None:
    values = run_values(tmp_path, keep_checkpoints=5)
    values["student"]["lora"] = {"rank": 4}
    path = write_run(tmp_path, values)
    config = load_run(path, ["~teachers.code", "student.lora={}", "~keep_checkpoints"])
    assert list(config.teachers) == ["math"]
    assert config.student.lora == LoraConfig()
    assert config.keep_checkpoints == 2
    new = "teachers.other={url: 'http://127.0.0.1:9'}"
    assert list(load_run(path, ["teachers={}", new]).teachers) == ["other"]
    for error in (load_error(path, "teachers={}"), _error_of(path, teachers={})):
        assert error.key == "teachers"  # none is left
    assert load_error(path, "~teachers.history").key == "teachers.history"


def _error_of(path: Path, **settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(path, **settings)
    return caught.value


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("max_steps", "max_steps"),
        ("teachers.math.topk=3", "teachers.math.topk"),
        ("max_steps=[1", None),
        ("max_steps=few", "max_steps"),
        ("student.betas=[0.9,1.0]", "student.betas.1"),
        ("student.betas=[-0.1,0.9]", "student.betas.0"),
        ("student.betas=[0.9]", "student.betas.1"),
        ("student.learning_rate=.inf", "student.learning_rate"),
        ("teachers.math.weight=.inf", "teachers.math.weight"),
        ("teachers=[math]", None),
        ("teachers.math.loss={type: gold, divergence: jsd}", "teachers.math.loss.divergence"),
        ("teachers.math.loss={type: ctkd, divergence: kl}", "teachers.math.loss.divergence"),
        ("teachers.math.loss.divergence=jsd", "teachers.math.loss"),
    ],
)
def test_invalid_override_is_reported_by_its_key(
    tmp_path: Path, override: str, key: str | None
) -> None:
    error = load_error(write_run(tmp_path, run_values(tmp_path)), override)
    assert error.key == key
    assert "\n" not in str(error)


def test_members_of_a_union_are_reported_by_the_key_in_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path))
    _, *listing = str(load_error(path, "resume_from_checkpoint=null")).splitlines()
    assert listing
    assert all(line.startswith("  resume_from_checkpoint: ") for line in listing)


def test_url_may_be_one_or_several(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    values["teachers"]["code"]["url"] = ["http://a:1", "http://b:2"]
    config = load_run(write_run(tmp_path, values))
    assert config.teachers["math"].url == ("http://127.0.0.1:9",)
    assert config.teachers["code"].url == ("http://a:1", "http://b:2")


def test_resolved_settings_load_as_the_same_run(tmp_path: Path) -> None:
    values = run_values(tmp_path, resume_from_checkpoint="runs/x/checkpoints/step-00000002")
    values["teachers"]["math"]["loss"] = {"type": "topk_kl", "divergence": "reverse_kl"}
    values["teachers"]["code"]["loss"] = {"type": "ctkd", "projection": {"weights": "first"}}
    values["student"]["learning_rate"] = 3.5e-7
    config = load_run(write_run(tmp_path, values))
    write_resolved(config, tmp_path / "resolved.yaml")
    assert load_run(tmp_path / "resolved.yaml") == config
    assert config != RunConfig.model_validate(run_values(tmp_path))
    assert config.resume_from_checkpoint == Path("runs/x/checkpoints/step-00000002")
