"""Teachers with their own prompts: requests, stored scores, evaluation and comparison."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mopd_protocol.manifest import Manifest
from mopd_protocol.samples import Message, Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.dataset_scoring.requests import count_rows, read_rows
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.diagnostics.template_agreement import check_agreement_of_templates
from mopd_trainer.evaluation.teacher_model import TeacherModel
from mopd_trainer.teachers.control import Controls
from tests import tiny_models
from tests.client.scripted_teacher import manifest
from tests.reference.teacher_scores import completion_logprobs
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.runs import write_lines
from tests.trainer.students import ids_of, rollout, student_of, table, tokenizer

pytestmark = pytest.mark.anyio

SHOTS = (
    Message(role="system", content="add"),
    Message(role="user", content="1 + 1 = 2\n12 + 30 ="),
)


def with_own_prompt(rollout: Rollout, teacher: str) -> Rollout:
    prompt = replace(rollout.prompt, teacher_messages={teacher: SHOTS})
    return replace(rollout, prompt=prompt)


@pytest.mark.parametrize("loss", ["topk_kl", "ctkd"])
async def test_a_teacher_scores_behind_its_own_messages(loss: str) -> None:
    """With ids and with text; the other teacher of the sample sees the student's messages."""
    network = tiny_models.qwen(tokenizer("digit"))
    service = teacher_of(network, tokenizer("digit"))
    own, other = Recorded(service.app), Recorded(service.app)
    teachers = {
        "own": (own, teacher_config(loss=loss, top_k=16)),
        "other": (other, teacher_config(loss=loss, top_k=16)),
    }
    sampled = rollout("digit", ids_of("digit", "42", "<|end|>"), teachers={"own": 1, "other": 1})
    async with scorer_of(student_of().identity, teachers) as scorer:
        (example,) = await scorer.score([with_own_prompt(sampled, "own")])
    plain = [message.model_dump() for message in sampled.prompt.messages]
    assert [each["messages"] for each in own.sequences] == [[m.model_dump() for m in SHOTS]]
    assert [each["messages"] for each in other.sequences] == [plain]
    chat = tokenizer("digit")
    for score, messages in zip(example.scores, (own, other), strict=True):
        text = chat.apply_chat_template(
            messages.sequences[0]["messages"], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = chat(text, add_special_tokens=False)["input_ids"]
        ids = score.score.token_ids.tolist()
        known = table("digit").real_ids(network.get_output_embeddings().weight.shape[0])
        rows = completion_logprobs(network, prompt_ids, ids, np.flatnonzero(known).tolist())
        expected = [row[token] for row, token in zip(rows, ids, strict=True)]
        assert score.score.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


async def test_a_teacher_is_evaluated_with_its_own_messages() -> None:
    transport = Recorded(teacher_of(tiny_models.qwen(tokenizer("digit")), tokenizer("digit")).app)
    query = Message(role="user", content="12 + 30 =")
    prompt = Prompt(0, (query,), {}, teacher_messages={"own": SHOTS})
    async with scorer_of(student_of().identity, {"own": (transport, teacher_config())}) as scorer:
        client = scorer._pool.client("own")
        model = TeacherModel(client, table("digit"), max_top_k=8, name="own")
        await model.complete([prompt], RolloutConfig(max_new_tokens=1, temperature=0.0), seed=0)
        await model.log_likelihood(prompt, "42")
    own = [message.model_dump() for message in SHOTS]
    assert [each["messages"] for each in transport.sequences] == [own, own]


async def test_templates_are_compared_on_the_teachers_own_messages() -> None:
    """The intended difference is no finding; equal templates agree on both prompts."""
    student = student_of().identity
    transport = Recorded(teacher_of(tiny_models.qwen(tokenizer("digit")), tokenizer("digit")).app)
    async with scorer_of(student, {"own": (transport, teacher_config())}) as scorer:
        prompt = rollout("digit", [5], teachers={"own": 1}).prompt
        prompt = replace(prompt, teacher_messages={"own": SHOTS})
        (finding,) = check_agreement_of_templates([prompt], student, scorer._teachers)
    assert finding.status == "ok"


def test_a_shuffled_control_has_the_own_messages_of_another_prompt() -> None:
    config = {"own": teacher_config(control="shuffled")}
    prompts = [
        Prompt(
            n,
            (Message(role="user", content="?"),),
            {"own": 1.0},
            teacher_messages={"own": (Message(role="user", content=f"? {n}"),)},
        )
        for n in range(2)
    ]
    controls = Controls.of(config, prompts, 0)
    sampled = replace(rollout("digit", [5], teachers={"own": 1}), prompt=prompts[0])
    scored = controls.scored_rollout("own", sampled)
    assert scored.prompt.teacher_messages["own"][0].content == "? 1"


@pytest.mark.parametrize("names", [["teacher"], ["own", "other"]])
def test_stored_scores_are_of_the_teachers_own_messages(tmp_path: Path, names: list[str]) -> None:
    line = {"prompt": "3 + 4 =", "completion": "7", "teacher": names[0]}
    line = {key: each for key, each in line.items() if key != "teacher" or len(names) > 1}
    data = write_lines(tmp_path / "data.jsonl", [line])
    addresses = [f"{name}=http://{name}" if len(names) > 1 else "http://a" for name in names]
    settings = [
        f"teachers.{names[0]}.{key}" for key in ("append_key=completion", "system_prompt=add")
    ]
    job = ScoringJob.of(data, tmp_path / "scores", addresses, settings)
    manifests: dict[str, Manifest] = {name: manifest() for name in names}
    assert count_rows(job) == 1
    (row,) = read_rows(job, manifests)
    messages = row.requests[names[0]].messages or []
    assert [each.content for each in messages] == ["add", "3 + 4 =\n\n7"]
    plain = ScoringJob.of(data, tmp_path / "scores", addresses)
    (other,) = read_rows(plain, manifests)
    assert other.keys[names[0]] != row.keys[names[0]]
    if len(names) > 1:  # a run on these scores reads the same messages
        (prompt,) = read_prompts(job.data, job.teachers)
        assert [*prompt.teacher_messages["own"]] == messages
