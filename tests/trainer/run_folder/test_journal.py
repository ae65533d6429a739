"""Journal: one line per step, without gaps or duplicates after a kill."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd_protocol.errors import CheckpointError
from mopd_trainer.run_folder.files import COMPLETIONS, JOURNAL
from mopd_trainer.run_folder.journal import Journal
from mopd_trainer.run_folder.logged_completion import logged_completion
from tests.trainer.scored_examples import example, topk_of
from tests.trainer.students import ids_of, rollout, table


def journal(folder: Path, from_step: int = 0, *, tensorboard: bool = False) -> Journal:
    return Journal(folder, from_step=from_step, tensorboard=tensorboard)


def lines(folder: Path, name: str = JOURNAL) -> list[dict[str, Any]]:
    text = (folder / name).read_text("utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def write_steps(folder: Path, first: int, last: int, *, run: str, from_step: int = 0) -> None:
    with journal(folder, from_step) as opened:
        for step in range(first, last + 1):
            opened.write(step, {"loss": step / 10})
            # U+2028 and U+0085 end a line for str.splitlines, not for JSONL.
            ids = ids_of("digit", f"{run} \u2028 \x85 的 {step}")
            opened.write_completions([logged_completion(step, example(rollout("digit", ids)))])


def test_step_is_a_line_with_null_for_missing_metrics(tmp_path: Path) -> None:
    with journal(tmp_path) as opened:
        opened.write(1, {"loss": 0.5, "ratio": float("nan"), "norm": float("inf")})
        opened.write(2, {"loss": 0.0})
    assert lines(tmp_path) == [
        {"step": 1, "loss": 0.5, "ratio": None, "norm": None},
        {"step": 2, "loss": 0.0},
    ]


def test_lines_are_written_immediately(tmp_path: Path) -> None:
    with journal(tmp_path) as opened:
        opened.write(1, {"loss": 0.5})
        assert [line["step"] for line in lines(tmp_path)] == [1]


def test_resumed_run_removes_later_steps(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 5, run="first")
    write_steps(tmp_path, 4, 6, run="second", from_step=3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    completions = [line["completion"] for line in lines(tmp_path, COMPLETIONS)]
    runs = ["first", "first", "first", "second", "second", "second"]
    assert completions == [f"{run} \u2028 \x85 的 {step}" for step, run in enumerate(runs, start=1)]


def test_new_run_removes_all_steps(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3, run="first")
    write_steps(tmp_path, 1, 2, run="second")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", [JOURNAL, COMPLETIONS])
def test_incomplete_last_line_is_removed(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path, 1, 3, run="first")
    content = (tmp_path / name).read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(content)):
        (tmp_path / name).write_bytes(content[:end])
        with journal(tmp_path, 3):
            pass
        assert (tmp_path / name).read_bytes() == content[:last]


@pytest.mark.parametrize("name", [JOURNAL, COMPLETIONS])
@pytest.mark.parametrize(
    "damage",
    [b'{"step": 2, "lo', b"5", b"{}", b"\0\0\0", b"\xff", b'{"step": 1e999}', b"[" * 10**5],
)
def test_damaged_line_is_reported_and_nothing_changes(
    tmp_path: Path, name: str, damage: bytes
) -> None:
    write_steps(tmp_path, 1, 3, run="first")
    first, *rest = (tmp_path / name).read_bytes().split(b"\n", 1)
    damaged = b"\n".join([first, damage, *rest])
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(CheckpointError) as caught:
        journal(tmp_path, 3)
    assert caught.value.key == f"{tmp_path / name}:2"
    assert (tmp_path / name).read_bytes() == damaged


def test_logged_completion(tmp_path: Path) -> None:
    ids = ids_of("digit", "7 ", b"\xff", "!", "<|end|>")
    with journal(tmp_path) as opened:
        opened.write_completions(
            [logged_completion(4, example(rollout("digit", ids, teachers={"math": 2.0})))]
        )
    assert lines(tmp_path, COMPLETIONS) == [
        {
            "step": 4,
            "prompt": [{"role": "user", "content": "3 + 4 ="}],
            "completion": "7 �!",
            "source": "rollout",
            "policy_version": 0,
            "finish_reason": "stop",
            "corrected_tokens": [],
            "sample": 0,
            "turn": 0,
            "teachers": {"math": 1.0},
            "metadata": {},
            "tokens": {
                "count": 5,
                "ids": ids,
                "bytes": ["37", "20", "ff", "21", ""],
                "marks": {"4": "end_of_turn"},
            },
            "nats": {},
            "scores": {
                "math": {
                    "count": 5,
                    "ids": ids,
                    "bytes": ["37", "20", "ff", "21", ""],
                    "marks": {"4": "end_of_turn"},
                    "chunks": [5],
                }
            },
        }
    ]


def test_logged_completion_has_both_tokenizations_and_likely_tokens() -> None:
    # The student's tokens are digits, the teacher has tokens of two digits.
    item = example(rollout("digit", ids_of("digit", "12 + 345", "<|end|>"), teachers={"code": 1.0}))
    (aligned,) = item.scores
    tables = {"code": table("whole_number")}
    student = (table("digit"), topk_of(item.rollout.completion, range(200), seed=1))
    line = logged_completion(1, item, student=student, teachers=tables, top_k=3)
    score, tokens = line["scores"]["code"], line["tokens"]
    spelled = [bytes.fromhex(each) for each in score["bytes"]]
    assert spelled == [b"12", b" +", b" ", b"3", b"45", b""]
    assert score["chunks"] == [[2, 1], 3, [2, 1], 1]
    for listed, topk, k in ((score, aligned.score.topk, 3), (tokens, student[1], 8)):
        assert listed["top_ids"] == topk.ids[:, :k].tolist()
        np.testing.assert_allclose(listed["top_logprobs"], topk.logprobs[:, :k], rtol=1e-3)
        np.testing.assert_allclose(listed["logprobs"], topk.token_logprobs, rtol=1e-3)
        assert listed["spellings"].keys() == {str(i) for i in topk.ids[:, :k].ravel()}
    literal = {token: name for name, token in table("digit").controls.items()}
    assert tokens["spellings"] == {
        key: table("digit").bytes_of(int(key)).hex() or f"<{literal[int(key)]}>"
        for key in tokens["spellings"]
    }


@pytest.mark.parametrize("from_step", [0, 2])
def test_tensorboard_has_each_step_once(
    tmp_path: Path, from_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files are read in the order of their names: second, then an unpadded number.
    seconds = count(1_000)
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    with journal(tmp_path, tensorboard=True) as opened:
        for step in range(1, 4):
            opened.write(step, {"loss": 1.0, "ratio": float("nan")})
    with journal(tmp_path, from_step, tensorboard=True) as opened:
        for step in range(from_step + 1, 5):
            opened.write(step, {"loss": 2.0, "ratio": float("nan")})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    scalars = [(event.step, event.value) for event in events.Scalars("loss")]
    assert scalars == [(step, 1.0 if step <= from_step else 2.0) for step in range(1, 5)]
