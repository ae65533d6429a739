"""Rows of an export, read as the other trainers' collators and losses read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_trainer.dataset_scoring.export import export
from mopd_trainer.dataset_scoring.requests import read_rows
from tests import tiny_models
from tests.trainer.dataset_scoring.fake_teacher import MANIFEST, FakeTeacher, job_of, score
from tests.trainer.runs import write_lines
from tests.trainer.students import model_of, tokenizer

pytestmark = pytest.mark.anyio

LINES = [{"prompt": f"{n} + 1 =", "completion": f"{n + 1}"} for n in (3, 55, 3, 410)]
K = 4


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A student with the tokenizer of the fake teacher."""
    folder = tmp_path_factory.mktemp("student")
    return str(tiny_models.save(model_of("qwen"), tokenizer("digit"), folder))


@pytest.fixture
def exported(tmp_path: Path, student: str) -> Callable[..., Any]:
    data = write_lines(tmp_path / "data.jsonl", LINES)

    async def rows(form: str, **teacher: Any) -> list[dict[str, Any]]:
        job = job_of(data, tmp_path / "scores", top_k=K)
        await score(job, FakeTeacher(**teacher))
        path, count = export(data, job.output, form, student)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(lines) == count
        return lines

    return rows


def scores_of(tmp_path: Path) -> list[Any]:
    """Return the teacher's score of each row."""
    job = job_of(tmp_path / "data.jsonl", tmp_path / "scores", top_k=K)
    rows = read_rows(job, {"teacher": MANIFEST})
    return [FakeTeacher().score_of(row.requests["teacher"], K) for row in rows]


async def test_axolotl_compares_the_logits_of_a_position_with_the_next_token(
    tmp_path: Path, exported: Callable[..., Any]
) -> None:
    rows = await exported("axolotl")
    assert len(rows) == len(LINES)
    for row, expected in zip(rows, scores_of(tmp_path), strict=True):
        completion = expected.token_ids.tolist()
        prompt = len(row["input_ids"]) - len(completion)
        assert row["input_ids"][prompt:] == completion
        assert row["labels"] == [-100] * prompt + completion
        lengths = {len(value) for value in row.values()}
        assert lengths == {len(row["input_ids"])}
        # ``LigerFusedLinearKLTopKLogprobFunction`` shifts labels by one and targets by none.
        shifted = [*row["labels"][1:], -100]
        for at, label in enumerate(shifted):
            if label == -100:
                assert row["target_token_ids"][at] == row["target_mask"][at] == []
                continue
            topk = expected.topk.rows(at - prompt + 1, at - prompt + 2)
            assert row["target_token_ids"][at] == topk.ids[0].tolist()
            assert row["target_mask"][at] == [1] * K
            probabilities = np.exp(topk.logprobs[0])
            renormalised = probabilities / probabilities.sum()
            assert np.exp(row["target_logprobs"][at]) == pytest.approx(renormalised, abs=1e-6)


async def test_trl_compares_a_position_with_its_own_token(
    tmp_path: Path, exported: Callable[..., Any]
) -> None:
    rows = await exported("trl")
    for number, (row, expected) in enumerate(zip(rows, scores_of(tmp_path), strict=True)):
        completion = expected.token_ids.tolist()
        prompt = len(row["input_ids"]) - len(completion)
        assert row["completion_mask"] == [0] * prompt + [1] * len(completion)
        assert (row["prompt_id"], row["teacher_id"]) == (number, "teacher")
        ids, logprobs = (np.array(row[f"teacher_topk_{each}"]) for each in ("ids", "logprobs"))
        assert ids.shape == logprobs.shape == (len(row["input_ids"]), K + 1)
        assert (ids[:prompt] == -1).all()
        for at, token in enumerate(completion):
            own = dict(zip(ids[prompt + at].tolist(), logprobs[prompt + at].tolist(), strict=True))
            assert own[token] == pytest.approx(float(expected.logprobs[at]), rel=1e-6)
            assert ids[prompt + at, :K].tolist() == expected.topk.ids[at].tolist()


async def test_rejected_rows_are_skipped_and_unscored_ones_are_an_error(
    tmp_path: Path, exported: Callable[..., Any], student: str
) -> None:
    assert len(await exported("trl", rejected={"4": 413})) == 2
    data = write_lines(tmp_path / "more.jsonl", [*LINES, {"prompt": "?", "completion": "new"}])
    with pytest.raises(DataError) as caught:
        export(data, tmp_path / "scores", "trl", student)
    assert caught.value.key == f"{data}:5"


async def test_a_student_of_another_vocabulary_is_rejected(
    tmp_path: Path, exported: Callable[..., Any]
) -> None:
    await exported("axolotl")
    other = tmp_path / "other"
    tiny_models.save(model_of("gpt_neox"), tokenizer("whole_number"), other)
    for student in (str(other), None):
        with pytest.raises(ConfigError) as caught:
            export(tmp_path / "data.jsonl", tmp_path / "scores", "axolotl", student)
        assert caught.value.key == "student"
