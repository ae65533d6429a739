"""Scoring with a teacher in this process: deduplicated, resumable, bounded."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_client.request_parts import LIMITS
from mopd_protocol.errors import CheckpointError, ConfigError, DataError, TeacherError
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.dataset_scoring.requests import count_rows, read_rows
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.teachers.stored.client import StoredTeacher
from mopd_trainer.teachers.stored.folder import ScoreFolder
from tests.trainer.dataset_scoring.fake_teacher import (
    MANIFEST,
    TOKENIZER,
    FakeTeacher,
    job_of,
    score,
    shards,
)
from tests.trainer.runs import write_lines

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows a shard."""
    monkeypatch.setitem(LIMITS, "sequences", 3)


def lines(count: int, *, distinct: int | None = None) -> list[dict[str, str]]:
    numbers = [number % (distinct or count) for number in range(count)]
    return [{"prompt": f"{n} + 1 =", "completion": f"{n + 1}"} for n in numbers]


async def test_equal_completions_are_scored_once_in_the_order_of_the_data(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", lines(20, distinct=7))
    job, teacher = job_of(data, tmp_path / "scores"), FakeTeacher()
    done = await score(job, teacher)
    sent = sorted(str(each.completion) for each in teacher.sent)
    assert sent == [str(n + 1) for n in range(7)]
    assert (done.rows, done.scored, done.repeated) == (20, 7, 13)
    assert len(shards(job.output)) == 3
    again = FakeTeacher()
    assert (await score(job, again)).repeated == 20
    assert not again.sent
    folder = ScoreFolder.open(job.output)
    for row in read_rows(job, {"teacher": MANIFEST}):
        [stored] = folder.read([*row.keys.values()])
        expected = teacher.score_of(row.requests["teacher"], 4)
        assert stored.topk.logprobs.tolist() == expected.topk.logprobs.tolist()  # type: ignore[union-attr]
    folder.close()


@pytest.mark.parametrize("concurrency", [1, 3])
@settings(max_examples=20)
@given(
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    failures=st.lists(st.integers(0, 12), max_size=4),
)
async def test_an_interrupted_job_writes_the_shards_of_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory,
    concurrency: int,
    numbers: list[int],
    failures: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    data = write_lines(
        folder / "data.jsonl", [{"prompt": f"{n} =", "completion": f"{n}"} for n in numbers]
    )
    whole, resumed = (job_of(data, folder / name) for name in ("whole", "resumed"))
    await score(whole, FakeTeacher(), concurrency=concurrency)
    for fail_after in failures:
        try:
            await score(resumed, FakeTeacher(fail_after=fail_after), concurrency=concurrency)
        except* TeacherError:
            pass
    await score(resumed, FakeTeacher(), concurrency=concurrency)
    assert shards(whole.output) == shards(resumed.output)


async def test_shards_that_were_not_indexed_are_removed(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", lines(8))
    job = job_of(data, tmp_path / "scores")
    await score(job, FakeTeacher())
    before = shards(job.output)
    index = sqlite3.connect(job.output / "index.sqlite")
    with index:
        index.execute("DELETE FROM scores WHERE shard = 3")
        index.execute("DELETE FROM shards WHERE id = 3")
    index.close()
    stray = job.output / "scores" / MANIFEST.manifest_id / f"{'0' * 64}.safetensors"
    stray.write_bytes(b"")
    teacher = FakeTeacher()
    await score(job, teacher)
    assert len(teacher.sent) == 2
    assert shards(job.output) == before
    (job.output / next(iter(before))).unlink()
    with pytest.raises(CheckpointError) as caught:
        await score(job, FakeTeacher())
    assert str(caught.value.key).endswith(next(iter(before)))


async def test_a_rejected_completion_names_its_row_and_one_too_long_is_skipped(
    tmp_path: Path,
) -> None:
    data = write_lines(tmp_path / "data.jsonl", lines(5))
    job = job_of(data, tmp_path / "scores")
    with pytest.raises(ExceptionGroup) as caught:
        await score(job, FakeTeacher(rejected={"4": 422}))
    group = caught.value.subgroup(DataError)
    assert group is not None
    [error] = group.exceptions
    assert error.key == f"{data}:4"  # type: ignore[attr-defined]
    skipping = job_of(data, tmp_path / "scores", "data.on_bad_line=skip")
    teacher = FakeTeacher(rejected={"4": 422, "5": 413})
    done = await score(skipping, teacher)
    assert (done.scored, done.too_long) == (3, 1)
    again = FakeTeacher()
    assert (await score(job, again)).repeated == 5
    assert not again.sent


async def test_other_options_or_teachers_need_another_folder(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", lines(2))
    output = tmp_path / "scores"
    await score(job_of(data, output), FakeTeacher())
    for options, key in (
        ({"top_k": 5}, "teachers.teacher.top_k"),
        ({"temperature": 2.0}, "teachers.teacher.temperature"),
    ):
        with pytest.raises(ConfigError) as caught:
            await score(job_of(data, output, **options), FakeTeacher())
        assert caught.value.key == key
    other = ScoringJob.of(data, output, ["math=http://127.0.0.1:9"], top_k=4)
    with pytest.raises(ConfigError) as caught:
        await score(other, FakeTeacher())
    assert caught.value.key == "teacher"


def test_invalid_rows_are_found_before_the_first_request(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [*lines(3), {"prompt": "?"}])
    with pytest.raises(DataError) as caught:
        count_rows(job_of(data, tmp_path / "scores"))
    assert caught.value.key == f"{data}:4"
    assert count_rows(job_of(data, tmp_path / "scores", "data.on_bad_line=skip")) == 3


@pytest.mark.parametrize(
    ("teachers", "overrides", "key"),
    [
        (["http://a", "code=http://b"], [], "teacher"),
        (["http://a"], ["teachers.teacher.support=student_topk"], "teachers.teacher.support"),
        (["http://a"], ["teachers.teacher.control=shuffled"], "teachers.teacher"),
        (["http://a"], ["data.answer_kay=x"], "data.answer_kay"),
    ],
)
def test_invalid_arguments_name_the_setting(
    tmp_path: Path, teachers: list[str], overrides: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ScoringJob.of(tmp_path / "data.jsonl", tmp_path / "scores", teachers, overrides)
    assert caught.value.key == key


def test_rows_choose_between_named_teachers(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "1", "completion": "1", "teacher": "math"},
        {"prompt": "2", "completion": "2", "teacher": {"math": 1, "code": 3}},
    ]
    data = write_lines(tmp_path / "data.jsonl", rows)
    teachers = ["math=http://a", "code=http://b", "code=http://c?x=1"]
    job = ScoringJob.of(data, tmp_path / "scores", teachers)
    assert job.teachers["code"].url == ("http://b", "http://c?x=1")
    manifests = dict.fromkeys(job.teachers, MANIFEST)
    assert [sorted(row.keys) for row in read_rows(job, manifests)] == [["math"], ["code", "math"]]


async def test_a_stored_teacher_returns_the_scores_of_the_teacher(tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "data.jsonl", [{"prompt": "an article", "completion": "the"}, *lines(5)]
    )
    job = job_of(data, tmp_path / "scores")
    await score(job, FakeTeacher(rejected={"5": 413}))
    config = TeacherConfig.model_validate({"scores": job.output, "top_k": 4})
    stored = StoredTeacher("math", config)
    await stored.wait_until_ready(1)
    rows = [*read_rows(job, {"teacher": MANIFEST})]
    texts = [row.requests["teacher"] for row in rows]
    ids = (await FakeTeacher().score(texts[:1], top_k=4))[0].token_ids[:-1].tolist()
    as_ids = texts[0].model_copy(update={"completion": None, "completion_token_ids": ids})
    for request in (texts[0], as_ids):
        [result] = await stored.score([request], top_k=4)
        assert result.topk.ids.tolist() == FakeTeacher().score_of(texts[0], 4).topk.ids.tolist()
    as_bytes = [TOKENIZER.table.all_bytes.index(bytes([each])) for each in b"the"]
    wrong = as_ids.model_copy(update={"completion_token_ids": as_bytes})
    unknown = texts[0].model_copy(update={"completion": "other"})
    for request in (wrong, unknown):
        with pytest.raises(DataError) as caught:
            await stored.score([request], top_k=4)
        assert caught.value.key == "teachers.math.scores"
    with pytest.raises(TeacherError) as rejected:
        await stored.score(texts, top_k=4)
    assert rejected.value.status == 413
    await stored.aclose()
    changed = StoredTeacher("math", config.model_copy(update={"top_k": 5}))
    with pytest.raises(ConfigError) as differs:
        await changed.wait_until_ready(1)
    assert differs.value.key == "teachers.math.top_k"
