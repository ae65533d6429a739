"""Control arms: only the right teacher teaches; the others have no information about the prompt."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Message, Prompt, messages_for
from mopd_trainer.config.run import TeacherConfig
from mopd_trainer.student.student import Student
from mopd_trainer.teachers.control import Controls, constant_negative_score, random_score
from tests import tiny_models
from tests.trainer.runs import run_values, write_lines
from tests.trainer.scored_examples import example
from tests.trainer.students import CPU, ids_of, model_of, rollout, table, tokenizer
from tests.trainer.whole_runs import journal, run_here

COUNT = 8


def completion_of(number: int) -> str:
    return str((3 * number + 1) % COUNT)


def taught() -> Student:
    """Return a model that completes every prompt correctly."""
    torch.manual_seed(0)
    student = Student(model_of("qwen", seed=3), tokenizer("digit"), CPU)
    ending = student.table.roles.ending[0]
    prompts = [
        student.prompt_token_ids([Message(role="user", content=f"{n} ?")]) for n in range(COUNT)
    ]
    completions = [student.identity.encoder.encode(completion_of(n)) for n in range(COUNT)]
    ids = torch.tensor([[*p, *a, ending] for p, a in zip(prompts, completions, strict=True)])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = -100
    optimizer = torch.optim.Adam(student.model.parameters(), lr=3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        loss: Any = student.model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05
    return student


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a teacher and of a student."""
    folder = tmp_path_factory.mktemp("models")
    taught().save(folder / "teacher")
    tiny_models.save(model_of("qwen"), tokenizer("digit"), folder / "student")
    return {name: folder / name for name in ("teacher", "student")}


@pytest.mark.slow
@pytest.mark.parametrize("control", [None, "shuffled", "random", "constant_negative"])
def test_only_the_right_teacher_teaches(
    tmp_path: Path, folders: dict[str, Path], control: str | None
) -> None:
    lines = [{"prompt": f"{n} ?", "answer": completion_of(n)} for n in range(COUNT)]
    path = str(write_lines(tmp_path / "prompts.jsonl", lines))
    values = run_values(tmp_path, max_steps=100, logging_steps=100)
    values["logging"] = {"tensorboard": False, "completions": 0}
    values["data"]["answer_key"] = "answer"
    values["student"] |= {"model": str(folders["student"]), "learning_rate": 3e-3}
    values["student"]["min_learning_rate_ratio"] = 0.1
    values["rollout"] = {
        "prompts_per_step": COUNT,
        "samples_per_prompt": 4,
        "max_new_tokens": 3,
        "scoring": "after_rollout",
    }
    teacher = {"placement": "local", "model": str(folders["teacher"]), "top_k": 64}
    values["teachers"] = {"own": {**teacher, "loss": "topk_kl", "control": control}}
    sets = {"all": {"prompts": path, "answer_key": "answer"}}
    values["evaluation"] = {"every": 100, "sets": sets}
    values["stop_on_degradation"] = False
    _, output = run_here(values)
    last = journal(tmp_path / "run")[-1]
    accuracy = last["evaluation/all/accuracy"]
    assert accuracy == 1.0 if control is None else accuracy <= 0.5
    assert (f"CONTROL ARM: {control}" in output) == (control is not None)
    assert last.get("teacher/own/control") == (None if control is None else 1.0)
    assert last["teacher/own/scored_tokens"] > 0


def test_a_random_row_keeps_its_probabilities_and_has_other_ids() -> None:
    score = example(rollout("digit", ids_of("digit", "7 + 12"))).scores[0].score
    changed = random_score(score, table("digit"), np.random.default_rng(0))
    assert np.array_equal(changed.topk.logprobs, score.topk.logprobs)
    assert np.array_equal(changed.topk.tail_logprobs, score.topk.tail_logprobs)
    assert not np.array_equal(changed.topk.ids, score.topk.ids)
    for row, token in enumerate(score.completion.token_ids.tolist()):
        ids = changed.topk.ids[row]
        present = ids[ids >= 0]
        assert len(set(present.tolist())) == (score.topk.ids[row] >= 0).sum()
        rest = table("digit").present.sum() - len(present)
        expected = changed.topk.tail_logprobs[row] - math.log(max(rest, 1))
        if token in present:
            expected = changed.topk.logprobs[row, present.tolist().index(token)]
        assert changed.topk.token_logprobs[row] == pytest.approx(expected, abs=1e-5)


def test_constant_negative_advantage_is_of_unlikely_tokens() -> None:
    logprobs = np.log([0.9, 0.1])
    sampled = replace(rollout("digit", ids_of("digit", "12")), sampled_logprobs=logprobs)
    score = constant_negative_score("m", sampled)
    assert sampled.sampled_logprobs is not None
    gaps = score.topk.token_logprobs - sampled.sampled_logprobs
    assert gaps.tolist() == pytest.approx([0.0, -1.0])
    assert np.exp(score.topk.logprobs[:, 0]) + np.exp(score.topk.tail_logprobs) == pytest.approx(1)


def test_shuffled_prompts_are_others_of_the_teacher() -> None:
    teachers = {"a": {"a": 1.0}, "b": {"b": 1.0}}
    prompts = [
        Prompt(index=n, messages=(Message(role="user", content=f"{n // 2}"),), teachers=teachers[t])
        for n, t in enumerate("aaabbbaab")
    ]
    config = TeacherConfig.model_validate({"url": "http://x", "control": "shuffled"})
    controls = Controls.of({"a": config}, prompts, seed=1)
    own = {p.index: p.messages for p in prompts if "a" in p.teachers}
    assert controls.prompts["a"].keys() == own.keys()
    for index, messages in controls.prompts["a"].items():
        assert messages in own.values()
        assert messages != own[index]
        sampled = rollout("digit", ids_of("digit", "7"), index=index, messages=own[index])
        assert messages_for(controls.scored_rollout("a", sampled).prompt, "a") == messages
        assert controls.scored_rollout("b", sampled) is sampled
    assert Controls.of({"a": config}, prompts, seed=1) == controls
    with pytest.raises(ConfigError) as caught:
        Controls.of({"a": config}, prompts[:2], seed=1)
    assert caught.value.key == "teachers.a.control"
