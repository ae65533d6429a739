"""Recordings are loaded bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from mopd_protocol.errors import CheckpointError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.run_folder.recordings.recording import Recorder, Recording, step_path
from tests.trainer.scored_examples import example
from tests.trainer.students import MESSAGES, ids_of, rollout, table

PROMPTS = [Prompt(index=at, messages=MESSAGES, teachers={"math": 1.0}) for at in range(4)]


def recorder(folder: Path, done: int = 0) -> Recorder:
    return Recorder(folder, {}, student=table("digit"), data_fingerprint="f", done=done)


def examples() -> list[TrainingExample]:
    """Two teachers, one teacher with student top-k ids, a reference completion without scores."""
    ids = ids_of("digit", "7 ", b"\xff", "!", "<|end|>")
    topk = np.arange(3 * len(ids), dtype=np.int32).reshape(len(ids), 3)
    both = rollout("digit", ids, teachers={"math": 1.0, "code": 3.0}, index=2)
    reference = rollout("digit", ids_of("digit", "42", "<|end|>"), index=1)
    unscored = Rollout(
        prompt=Prompt(index=1, messages=MESSAGES, teachers={}),
        prompt_token_ids=reference.prompt_token_ids,
        completion=reference.completion,
        sampled_logprobs=None,
        finish_reason="stop",
        policy_version=9,
    )
    return [
        example(both),
        example(rollout("digit", ids[:2], topk_ids=topk[:2]), seed=5),
        TrainingExample(unscored, ()),
    ]


def test_recorded_samples_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    recorder(tmp_path).write(1, examples())
    recording = Recording(tmp_path)
    assert (recording.steps, recording.data_fingerprint, list(recording.teachers)) == (1, "f", [])
    assert recording.student_tokenizer == table("digit").fingerprint
    samples = recording.read(1, PROMPTS, table("digit"))
    assert len(samples) == 3
    for sample, expected in zip(samples, examples(), strict=True):
        rollout, recorded = expected.rollout, sample.rollout
        assert recorded.prompt == rollout.prompt
        assert (recorded.source, recorded.finish_reason) == (rollout.source, rollout.finish_reason)
        assert recorded.policy_version == rollout.policy_version
        assert recorded.completion.text == rollout.completion.text
        assert recorded.completion.marks == rollout.completion.marks
        for name in ("prompt_token_ids", "sampled_logprobs", "student_topk_ids"):
            np.testing.assert_array_equal(getattr(recorded, name), getattr(rollout, name), name)
        assert len(sample.scores) == len(expected.scores)
        for loaded, other in zip(sample.scores, expected.scores, strict=True):
            assert (loaded.teacher, loaded.weight) == (other.teacher, other.weight)
            score, original = loaded.score, other.score
            assert score.manifest_id == original.manifest_id
            assert score.completion.text == original.completion.text
            assert score.completion.marks == original.completion.marks
            for name in ("token_ids", "byte_ends"):
                np.testing.assert_array_equal(
                    getattr(score.completion, name), getattr(original.completion, name), name
                )
            for name in ("ids", "logprobs", "token_logprobs", "tail_logprobs"):
                np.testing.assert_array_equal(
                    getattr(score.topk, name), getattr(original.topk, name), name
                )


def test_steps_after_the_resumed_one_are_removed(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    for step in (1, 2, 3):
        first.write(step, examples())
    recorder(tmp_path, done=1)
    assert Recording(tmp_path).steps == 1
    with pytest.raises(CheckpointError) as caught:
        Recording(tmp_path).read(2, PROMPTS, table("digit"))
    assert caught.value.key == str(step_path(tmp_path / "recordings", 2))
    assert not list(tmp_path.rglob("*.part"))
    step_path(tmp_path / "recordings", 1).unlink()
    with pytest.raises(CheckpointError, match="found 0") as caught:
        Recording(tmp_path)
    assert caught.value.key == str(tmp_path / "recordings")


def test_shards_without_a_step_are_removed(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.write(1, examples())
    kept = shards(tmp_path)
    first.write(2, [example(rollout("digit", ids_of("digit", "other", "<|end|>")), seed=9)])
    assert len(shards(tmp_path)) > len(kept)
    recorder(tmp_path, done=1)
    assert shards(tmp_path) == kept
    recorder(tmp_path, done=0)
    assert not shards(tmp_path)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_shard_is_detected(tmp_path: Path, damage: str) -> None:
    recorder(tmp_path).write(1, examples())
    [path, *_] = shards(tmp_path)
    body = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(body[:-1] if damage == "cut" else body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(CheckpointError) as caught:
        Recording(tmp_path).read(1, PROMPTS, table("digit"))
    assert caught.value.key == str(path)


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "recordings" / "scores").glob("*/*.safetensors"))
