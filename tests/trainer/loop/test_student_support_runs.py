"""Whole runs whose teacher scores the student's own most likely ids, and their replays."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import ProjectionSettings
from mopd_losses.core.valid_text import invalid_positions
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Rollout
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.prompts import read_prompts
from mopd_trainer.run_folder.recordings.recording import RecordedSample, Recording
from mopd_trainer.student.student import Student
from tests import tiny_models
from tests.reference import ctkd, topk_divergence
from tests.reference.divergences import reverse_kl
from tests.reference.projection import Dense, dense_projection
from tests.reference.teacher_scores import completion_logprobs, next_token_logprobs
from tests.server.tiny_teachers import TinyTeacher, teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import CPU, FAMILIES, encoder, model_of, table, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

pytestmark = pytest.mark.slow

TOP_K = 6
STEPS = 8
#: Loss, teacher's family, teacher's tokenizer.
CASES = {
    "same vocabulary": ("topk_kl", "qwen", "digit"),
    "another vocabulary": ("ctkd", "llama", "sentencepiece"),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return CASES[request.param]


def reader_of(family: str, lines: Sequence[str]) -> PreTrainedModel:
    """A model that has read some lines, so that it writes text, and not bytes that are none."""
    name = FAMILIES[family][1]
    model = model_of(family).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        ids = torch.tensor([encoder(name).encode(lines[step % len(lines)])])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@cache
def student() -> Student:
    """Return the student whose weights each run begins with."""
    lines = ["the quick brown fox", "7 + 4 = 11", "jumps over the lazy dog"]
    return Student(reader_of("qwen", lines), tokenizer("digit"), CPU)


@pytest.fixture
def teacher(case: tuple[str, str, str]) -> TinyTeacher:
    _, family, name = case
    lines = ["the answer is 12", "over the lazy fox", "2 + 4 = 6, quick"]
    return teacher_of(reader_of(family, lines), tokenizer(name))


@pytest.fixture
def requested(teacher: TinyTeacher, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The runs' way to the teacher, which is in this process."""
    transport = Recorded(teacher.app)
    serve_in_process(monkeypatch, {"math": transport})
    return transport


@pytest.fixture
def values(tmp_path: Path, case: tuple[str, str, str]) -> dict[str, Any]:
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(4, ["math"]))
    folder = tiny_models.save(student().model, tokenizer("digit"), tmp_path / "student")
    values = run_values(tmp_path, max_steps=STEPS)
    values["student"] |= {"model": str(folder), "learning_rate": 3e-3}
    values["rollout"]["samples_per_prompt"] = 2
    values["importance_weights"] = {"least": 1}
    values["logging"] = {"tensorboard": False, "record": True}
    loss = {"type": case[0], "divergence": "reverse_kl"}
    values["teachers"] = {
        "math": {"url": "http://math", "support": "student_topk", "top_k": TOP_K, "loss": loss}
    }
    return values


def recorded(values: dict[str, Any], step: int) -> list[RecordedSample]:
    """The samples of a step, counted from 1."""
    prompts = read_prompts(RunConfig.model_validate(values).data, ["math"])
    return Recording(Path(values["output_dir"])).read(step, prompts, table("digit"))


def dense_of(name: str) -> Dense:
    return dense_projection(
        table("digit"),
        table(name),
        encoder(name),
        student_width=student().identity.logit_width,
        settings=ProjectionSettings(),
    )


def places(sample: RecordedSample, name: str) -> list[tuple[int, int]]:
    """Student row and teacher row of what is compared."""
    if name == "digit":
        return [(row, row) for row in range(len(sample.rollout.completion))]
    # A text that is scored, with the teacher's ending token in place of the student's.
    alignment = align(sample.rollout.completion, sample.scores[0].score.completion)
    return list(
        zip(alignment.student_starts.tolist(), alignment.teacher_starts.tolist(), strict=True)
    )


def rendered(sample: RecordedSample, name: str) -> list[int]:
    """The prompt in the tokens of the teacher."""
    messages = [message.model_dump() for message in sample.rollout.prompt.messages]
    text = tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def own_ids(rollout: Rollout) -> list[list[int]]:
    """Return the student's most likely ids at each token, from its full distribution."""
    real = np.flatnonzero(student().table.real_ids(student().identity.logit_width)).tolist()
    prompt, ids = rollout.prompt_token_ids.tolist(), rollout.completion.token_ids.tolist()
    rows = completion_logprobs(student().model, prompt, ids, real)
    return [sorted(row, key=lambda token: -row[token])[:TOP_K] for row in rows]


def counterparts(own: list[int], dense: Dense) -> list[int]:
    """The teacher's ids that the student's are projected on, in their order, at most ``TOP_K``."""
    actual: dict[int, None] = {}
    for token in own:
        reached = [at for at, weight in enumerate(dense[token]) if weight > 0]
        actual |= dict.fromkeys(sorted(reached, key=lambda at: -dense[token][at]))
    return list(actual)[:TOP_K]


def test_a_run_requests_scores_of_the_students_ids_and_learns_from_them(
    values: dict[str, Any], case: tuple[str, str, str], teacher: TinyTeacher, requested: Recorded
) -> None:
    name = case[2]
    run_here(values)

    samples = recorded(values, 1)
    dense = dense_of(name)
    assert len(samples) == 8
    expected_values: list[list[list[int]]] = []
    total = 0.0
    for sample in samples:
        own = own_ids(sample.rollout)
        assert sample.rollout.student_topk_ids is not None
        assert sample.rollout.student_topk_ids.tolist() == own
        rows: list[list[int]] = [[] for _ in range(len(sample.scores[0].score.completion))]
        for row, teacher_row in places(sample, name):
            rows[teacher_row] = own[row] if name == "digit" else counterparts(own[row], dense)
        expected_values.append(rows)
        total += divergence(sample, rows, dense, teacher, name)
    first = [sequence["candidate_ids"] for sequence in requested.sequences[: len(samples)]]
    assert sorted(first) == sorted(expected_values)
    assert any(len(row) == TOP_K for rows in expected_values for row in rows)

    lines = journal(Path(values["output_dir"]))
    tokens = sum(len(sample.rollout.completion) for sample in samples)
    assert lines[0]["objective"] == pytest.approx(total / tokens, rel=1e-4)
    actual = [line["loss"] for line in lines]
    assert np.mean(actual[-3:]) < 0.5 * np.mean(actual[:3]), actual
    for body in requested.requests:
        assert all("candidate_ids" in sequence for sequence in body["sequences"])


def divergence(
    sample: RecordedSample,
    rows: list[list[int]],
    dense: Dense,
    teacher: TinyTeacher,
    name: str,
) -> float:
    """Nats: the sum over what is compared, from both full distributions on the requested ids."""
    rollout, scored = sample.rollout, sample.scores[0].score.completion
    real = student().table.real_ids(student().identity.logit_width).tolist()
    prompt, ids = rollout.prompt_token_ids.tolist(), rollout.completion.token_ids.tolist()
    other = rendered(sample, name)
    total = 0.0
    for row, teacher_row in places(sample, name):
        with torch.no_grad():
            logits = student().model(torch.tensor([prompt + ids[:row]])).logits[0, -1].tolist()
        context = [*other, *scored.token_ids.tolist()[:teacher_row]]
        whole = next_token_logprobs(teacher.model, context, teacher.real_ids)
        kept = {token: float(np.exp(whole[token])) for token in rows[teacher_row]}
        rest = 1.0 - sum(kept.values())
        weights = dense
        if name != "digit":
            realised = int(scored.token_ids[teacher_row])
            probability = float(np.exp(whole[realised]))
            weights, kept, rest = ctkd.on_events(
                dense, first_tokens(name, dense), ids[row], realised, kept, rest, probability
            )
        value, _ = topk_divergence.place(
            logits,
            real,
            weights,
            kept,
            rest,
            form="tail_bucket",
            divergence=reverse_kl,
            forward=False,
            floored=True,
        )
        total += value
    for row in invalid_positions(rollout.completion) if name != "digit" else ():
        with torch.no_grad():
            logits = student().model(torch.tensor([prompt + ids[:row]])).logits[0, -1]
        probabilities = logits.masked_fill(~torch.tensor(real), -torch.inf).softmax(0)
        total -= math.log1p(-probabilities[ids[row]].item())
    return total


def first_tokens(name: str, dense: Dense) -> list[int]:
    """[teacher size], the student's first token of each id that no student id projects to."""
    reached = np.asarray(dense).any(axis=0)
    tokens: list[int] = []
    for spelled, is_reached in zip(table(name).all_bytes, reached, strict=True):
        text = spelled.decode(errors="ignore")
        is_text = not is_reached and text.encode() == spelled
        ids = encoder("digit").encode(text) if is_text else []
        tokens.append(ids[0] if ids else -1)
    return tokens


def test_a_replay_compares_on_the_recorded_ids(
    tmp_path: Path, values: dict[str, Any], requested: Recorded
) -> None:
    live, _ = run_here(values, max_steps=3)
    before = len(requested.requests)
    again = {
        **values,
        "max_steps": 3,
        "output_dir": str(tmp_path / "replay"),
        "replay": values["output_dir"],
        "logging": {"tensorboard": False},
    }
    replayed, _ = run_here(again)

    assert len(requested.requests) == before
    assert_same_weights(replayed, live)
    assert [line["loss"] for line in journal(tmp_path / "replay")] == [
        line["loss"] for line in journal(tmp_path / "run")
    ]
    again["output_dir"] = str(tmp_path / "another")
    again["teachers"]["math"] = {**values["teachers"]["math"], "support": "teacher_topk"}
    with pytest.raises(ConfigError) as caught:
        run_here(again)
    assert caught.value.key == "teachers.math.support"
