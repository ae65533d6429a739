"""Run files: what is wrong is told in one sentence, and what is right survives being written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.loading import load_run, write_resolved
from mopd_trainer.config.run import RunConfig
from tests.trainer.runs import run_values, write_run

Change = Callable[[dict[str, Any]], object]


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as told:
        load_run(path, overrides)
    return str(told.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda v: v.update(max_step=3), "unknown key 'max_step'; look for a spelling mistake"),
        (lambda v: v["student"].update(lora={"r": 8}), "unknown key 'student.lora.r'"),
        (lambda v: v["teachers"]["math"].update(topk=3), "unknown key 'teachers.math.topk'"),
        (lambda v: v.pop("output_dir"), "'output_dir' is missing"),
        (lambda v: v["rollout"].pop("max_new_tokens"), "'rollout.max_new_tokens' is missing"),
        (lambda v: v.update(max_steps="many"), "'max_steps' is 'many'"),
        (lambda v: v.update(max_steps=0), "'max_steps' is 0"),
        (lambda v: v["student"].update(learning_rate=-1), "'student.learning_rate' is -1"),
        (lambda v: v.update(teachers={}), "teachers is empty, but completions are to be judged"),
        (
            lambda v: v["student"].update(distill_loss_weight=0.5),
            "student.distill_loss_weight is 0.5, but every completion is the student's own, and "
            "cross entropy on those would train it to repeat itself",
        ),
        (
            lambda v: v["student"].update(distill_loss_weight=1.5),
            "'student.distill_loss_weight' is 1.5",
        ),
        (
            lambda v: v["data"].update(on_policy_fraction=0),
            "data.on_policy_fraction is 0, which leaves nothing to data.source 'rollout'",
        ),
        (
            lambda v: v["data"].update(source="answers", on_policy_fraction=1.0),
            "data.on_policy_fraction is 1, which leaves nothing to data.source 'answers'",
        ),
        (
            lambda v: v["rollout"].update(temperature=0, samples_per_prompt=4),
            "rollout.temperature is 0, so that all of rollout.samples_per_prompt 4 would be",
        ),
        (
            lambda v: v["rollout"].update(on_stale="drop"),
            "rollout.on_stale is 'drop', but with rollout.max_staleness 0 everything that is "
            "written ahead would be dropped",
        ),
        (
            lambda v: (
                v["rollout"].update(engine="vllm", top_p=0.9),
                v["teachers"]["code"].update(support="student_topk"),
            ),
            "a teacher has support 'student_topk', but rollout.top_p is 0.9 and vLLM tells no ids "
            "outside of that; set top_p to 1",
        ),
        *(
            (
                lambda v, data=data, loss=loss: (
                    v["data"].update(data),
                    v["teachers"]["code"].update(loss={"type": loss}),
                ),
                f"teacher 'code' has loss '{loss}', which is about what the student itself wrote",
            )
            for data in ({"source": "answers"}, {"on_policy_fraction": 0.9})
            for loss in ("policy_gradient", "k2", "k3")
        ),
        *(
            (
                lambda v, drawn=drawn, loss=loss: (
                    v["rollout"].update(drawn),
                    v["teachers"]["code"].update(loss={"type": loss}),
                ),
                f"teacher 'code' has loss '{loss}', which is right for samples of the student as "
                "it is, but rollout.temperature is",
            )
            for drawn in ({"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0})
            for loss in ("k2", "k3")
        ),
        (
            lambda v: (
                v["rollout"].update(temperature=0),
                v["teachers"]["code"].update(loss={"type": "policy_gradient"}),
            ),
            "teacher 'code' has loss 'policy_gradient', but rollout.temperature is 0",
        ),
        *(
            (
                lambda v, loss=loss: (
                    v["rollout"].update(max_staleness=2),
                    v["teachers"]["code"].update(loss={"type": loss}),
                ),
                f"teacher 'code' has loss '{loss}', which is right for samples of the weights that "
                "are trained, but rollout.max_staleness is 2",
            )
            for loss in ("k2", "k3")
        ),
        (
            lambda v: (v["data"].update(source="answers"), v.update(teachers={})),
            "teachers is empty, but completions are to be judged",
        ),
        (
            lambda v: (
                v["data"].update(on_policy_fraction=0.5),
                v["student"].update(distill_loss_weight=0),
                v.update(teachers={}),
            ),
            "teachers is empty, but completions are to be judged",
        ),
        (lambda v: v["teachers"]["math"].update(url=[]), "'teachers.math.url' is []"),
        (
            lambda v: v["data"].update(default_teacher="maths"),
            "data.default_teacher is 'maths'; known teachers are code, math",
        ),
        (lambda v: v["teachers"]["math"].update(loss={"type": "mse"}), "teachers.math.loss"),
    ],
)
def test_a_wrong_setting_is_told_in_one_sentence(
    tmp_path: Path, change: Change, sentence: str
) -> None:
    values = run_values(tmp_path)
    change(values)
    path = write_run(tmp_path, values)
    told = refusal(path)
    assert told.startswith(f"{path}: ")
    assert sentence in told
    assert "\n" not in told


def test_several_wrong_settings_are_a_sentence_and_a_list(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path, speed=1, max_steps=0))
    sentence, *told = refusal(path).splitlines()
    assert sentence == f"{path}: 2 settings cannot be used:"
    assert len(told) == 2
    assert told[0].startswith("  'max_steps' is 0: ")
    assert told[1].startswith("  unknown key 'speed'; ")


@pytest.mark.parametrize(
    ("data", "weight", "share", "judged", "asked"),
    [
        ({}, 1.0, 1.0, False, True),
        ({"source": "answers"}, 1.0, 0.0, True, True),
        ({"source": "answers"}, 0.3, 0.0, True, True),
        ({"source": "answers"}, 0.0, 0.0, False, False),
        ({"source": "answers", "on_policy_fraction": 0.25}, 0.3, 0.25, True, True),
        ({"source": "rollout", "on_policy_fraction": 0.25}, 0.0, 0.25, False, True),
    ],
)
def test_who_completes_prompts_and_who_reads_that(
    tmp_path: Path, data: dict[str, Any], weight: float, share: float, judged: bool, asked: bool
) -> None:
    values = run_values(tmp_path)
    values["data"].update(data)
    values["student"]["distill_loss_weight"] = weight
    config = RunConfig.model_validate(values)
    assert config.data.rollout_share == share
    assert config.scores_reference_answers == judged
    assert set(config.scoring_teachers) == ({"math", "code"} if asked else set())


def test_losses_on_samples_stay_where_only_samples_are_judged(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    values["teachers"]["math"]["loss"] = {"type": "policy_gradient"}
    values["data"]["on_policy_fraction"] = 0.5
    values["student"]["distill_loss_weight"] = 0
    assert not RunConfig.model_validate(values).scores_reference_answers


def test_plain_sft_needs_no_teacher(tmp_path: Path) -> None:
    values = run_values(tmp_path, teachers={})
    values["data"]["source"] = "answers"
    values["student"]["distill_loss_weight"] = 0
    assert RunConfig.model_validate(values).scoring_teachers == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"max_steps: [1\n", "expected ',' or ']'"),
        (b"max_steps:\n\t- 1\n", "cannot start any token"),
        (b"- max_steps\n", "found a list, expected keys and values"),
        (b"5\n", "Invalid loaded object type"),
        (b"exp_name: \xff\n", "can't decode byte 0xff"),
        (b"exp_name: ${nobody}\n", "Interpolation key 'nobody' not found"),
    ],
)
def test_a_file_that_is_no_run_is_told_in_one_sentence(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    told = refusal(path)
    assert told.startswith(f"{path}: ")
    assert sentence in told
    assert "\n" not in told


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert refusal(path) == f"{path}: no such file; expected a run's YAML"


def test_overrides_replace_settings_at_any_depth(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path))
    config = load_run(
        path,
        [
            "max_steps=7",
            "teachers.math.top_k=32",
            "teachers.code.loss.divergence=reverse_kl",
            "teachers.code.loss.type=ctkd",
            "student.betas=[0.8,0.99]",
            "resume_from_checkpoint=true",
        ],
    )
    assert (config.max_steps, config.resume_from_checkpoint) == (7, True)
    assert (config.teachers["math"].top_k, config.teachers["code"].top_k) == (32, 8)
    assert config.teachers["code"].loss.divergence == "reverse_kl"
    assert config.student.betas == (0.8, 0.99)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("max_steps", "override 'max_steps' has no '='; expected key=value"),
        ("teachers.math.topk=3", "unknown key 'teachers.math.topk'"),
        ("max_steps=[1", "expected ',' or ']'"),
        ("max_steps=few", "'max_steps' is 'few'"),
        ("student.betas=[0.9,1.0]", "'student.betas.1' is 1.0: Input should be less than 1"),
        ("student.betas=[-0.1,0.9]", "'student.betas.0' is -0.1: Input should be greater than"),
        ("student.betas=[0.9]", "'student.betas.1' is missing"),
        ("student.learning_rate=.inf", "'student.learning_rate' is inf: Input should be a finite"),
        ("teachers.math.weight=.inf", "'teachers.math.weight' is inf: Input should be a finite"),
        ("teachers=[math]", "Cannot merge incompatible container types"),
        (
            "teachers.math.loss={type: gold, divergence: jsd}",
            "unknown key 'teachers.math.loss.divergence'",
        ),
        (
            "teachers.math.loss={type: ctkd, divergence: kl}",
            "'teachers.math.loss.divergence' is 'kl': Input should be 'forward_kl', ",
        ),
        (
            "teachers.math.loss.divergence=jsd",
            "'teachers.math.loss' is {'divergence': 'jsd'}, without 'type'; add it",
        ),
    ],
)
def test_a_wrong_override_is_told_in_one_sentence(
    tmp_path: Path, override: str, sentence: str
) -> None:
    told = refusal(write_run(tmp_path, run_values(tmp_path)), override)
    assert sentence in told
    assert "\n" not in told


def test_alternatives_are_told_under_the_key_that_the_user_wrote(tmp_path: Path) -> None:
    path = write_run(tmp_path, run_values(tmp_path))
    _, *told = refusal(path, "resume_from_checkpoint=null").splitlines()
    assert told
    assert all(line.startswith("  'resume_from_checkpoint' is None: ") for line in told)


def test_a_url_may_be_one_or_several(tmp_path: Path) -> None:
    values = run_values(tmp_path)
    values["teachers"]["code"]["url"] = ["http://a:1", "http://b:2"]
    config = load_run(write_run(tmp_path, values))
    assert config.teachers["math"].url == ("http://127.0.0.1:9",)
    assert config.teachers["code"].url == ("http://a:1", "http://b:2")


def test_a_resolved_run_is_read_as_the_same_run(tmp_path: Path) -> None:
    values = run_values(tmp_path, resume_from_checkpoint="runs/x/checkpoints/step-00000002")
    values["teachers"]["math"]["loss"] = {"type": "topk_kl", "divergence": "reverse_kl"}
    values["teachers"]["code"]["loss"] = {"type": "ctkd", "projection": {"weights": "first"}}
    values["student"]["learning_rate"] = 3.5e-7
    config = load_run(write_run(tmp_path, values))
    write_resolved(config, tmp_path / "resolved.yaml")
    assert load_run(tmp_path / "resolved.yaml") == config
    assert config != RunConfig.model_validate(run_values(tmp_path))
    assert config.resume_from_checkpoint == Path("runs/x/checkpoints/step-00000002")
