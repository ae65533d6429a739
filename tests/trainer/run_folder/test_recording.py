"""Recordings on disk: what is read is what was written, to the last bit."""

from pathlib import Path

import numpy as np
import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.run_folder.recording import Recorder, Recording, step_path
from tests.trainer.judged import example
from tests.trainer.students import QUESTION, ids_of, rollout, table

PROMPTS = [Prompt(index=at, messages=QUESTION, teachers={"math": 1.0}) for at in range(4)]


def recorder(folder: Path, done: int = 0) -> Recorder:
    return Recorder(folder, {}, student=table("digit"), data_fingerprint="f", done=done)


def examples() -> list[TrainingExample]:
    """Two teachers, one teacher with the student's own ids, and an answer that nobody judged."""
    ids = ids_of("digit", "7 ", b"\xff", "!", "<|end|>")
    topk = np.arange(3 * len(ids), dtype=np.int32).reshape(len(ids), 3)
    both = rollout("digit", ids, teachers={"math": 1.0, "code": 3.0}, index=2)
    answer = rollout("digit", ids_of("digit", "42", "<|end|>"), index=1)
    unjudged = Rollout(
        prompt=Prompt(index=1, messages=QUESTION, teachers={}),
        prompt_token_ids=answer.prompt_token_ids,
        completion=answer.completion,
        sampled_logprobs=None,
        finish_reason="stop",
        policy_version=9,
    )
    return [
        example(both),
        example(rollout("digit", ids[:2], topk_ids=topk[:2]), seed=5),
        TrainingExample(unjudged, ()),
    ]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    recorder(tmp_path).write(1, examples())
    recording = Recording(tmp_path)
    assert (recording.steps, recording.data_fingerprint, list(recording.teachers)) == (1, "f", [])
    assert recording.student_tokenizer == table("digit").fingerprint
    found = recording.read(1, PROMPTS, table("digit"))
    assert len(found) == 3
    for sample, written in zip(found, examples(), strict=True):
        ours, theirs = sample.rollout, written.rollout
        assert ours.prompt == theirs.prompt
        assert (ours.source, ours.finish_reason) == (theirs.source, theirs.finish_reason)
        assert ours.policy_version == theirs.policy_version
        assert ours.completion.text == theirs.completion.text
        assert ours.completion.marks == theirs.completion.marks
        for name in ("prompt_token_ids", "sampled_logprobs", "student_topk_ids"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)
        assert len(sample.scores) == len(written.scores)
        for judgement, other in zip(sample.scores, written.scores, strict=True):
            assert (judgement.teacher, judgement.weight) == (other.teacher, other.weight)
            score, given = judgement.score, other.score
            assert score.manifest_id == given.manifest_id
            assert score.completion.text == given.completion.text
            assert score.completion.marks == given.completion.marks
            for name in ("token_ids", "byte_ends"):
                np.testing.assert_array_equal(
                    getattr(score.completion, name), getattr(given.completion, name), name
                )
            for name in ("ids", "logprobs", "token_logprobs", "tail_logprobs"):
                np.testing.assert_array_equal(
                    getattr(score.topk, name), getattr(given.topk, name), name
                )


def test_steps_that_are_done_again_are_recorded_again(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    for step in (1, 2, 3):
        first.write(step, examples())
    recorder(tmp_path, done=1)
    assert Recording(tmp_path).steps == 1
    with pytest.raises(DataError, match=r"step-00000002\.safetensors cannot be read "):
        Recording(tmp_path).read(2, PROMPTS, table("digit"))
    assert not list(tmp_path.rglob("*.part"))
    step_path(tmp_path / "recordings", 1).unlink()
    with pytest.raises(DataError, match="holds no step; expected "):
        Recording(tmp_path)
