"""Recordings: each step's completions and what its teachers said, on disk, to be trained on again.

A run's ``recordings`` folder holds ``recording.json`` (the data's fingerprint, the tokenizers, the
manifests, and what each teacher was asked for) and a ``.safetensors`` file a step. A step takes 8
bytes for a token of the student (and 4 for each of its own ids that were kept), 16 + 8 k and the
token's text for a token that a teacher scored with k entries, and less than 2 kB a sample besides.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mopd_client.tokenizers.teacher import TeacherTokenizer, teacher_tokenizer
from mopd_protocol.errors import DataError
from mopd_protocol.manifest import Manifest
from mopd_protocol.runtime.atomic_file import remove_leftovers, replacing
from mopd_protocol.samples import Prompt, Rollout, TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.run_folder.disk_errors import disk_errors
from mopd_trainer.teachers.connect import Teacher

RECORDINGS = "recordings"
_FACTS = "recording.json"
_KEPT = "the steps before it are recorded whole"

Arrays = dict[str, np.ndarray[Any, Any]]
JSON = dict[str, Any]


@dataclass(frozen=True)
class RecordedJudgement:
    """What a teacher said about a completion; how it is compared with it is up to the loss."""

    teacher: str
    weight: float
    score: TeacherScore


@dataclass(frozen=True)
class RecordedSample:
    """A completion, and who judged it."""

    rollout: Rollout
    scores: tuple[RecordedJudgement, ...]


class Recorder:
    """Writes a run's recordings.

    Args:
        done: steps that the run has done; recordings of later ones are removed.

    Raises:
        DataError: when the disk takes no more.
    """

    def __init__(
        self,
        output_dir: Path,
        teachers: Mapping[str, Teacher],
        *,
        student: TokenTable,
        data_fingerprint: str,
        done: int,
    ) -> None:
        self._folder = output_dir / RECORDINGS
        remove_leftovers(self._folder)
        for path in self._folder.glob("step-*.safetensors"):
            if path > step_path(self._folder, done):
                path.unlink()
        facts = {
            "data_fingerprint": data_fingerprint,
            "student_tokenizer": student.fingerprint,
            "teachers": {name: _teacher_facts(teacher) for name, teacher in teachers.items()},
        }
        text = json.dumps(facts).encode()
        path = self._folder / _FACTS
        with (
            disk_errors(path, "the recording", needed=len(text), kept=_KEPT),
            replacing(path, durable=True) as temporary,
        ):
            temporary.write_bytes(text)

    def write(self, step: int, examples: Sequence[TrainingExample]) -> None:
        """Records the examples of a step (counted from 1), whole or not at all.

        Raises:
            DataError: when the disk takes no more.
        """
        arrays: Arrays = {}
        samples = [_sample(f"{at}", example, arrays) for at, example in enumerate(examples)]
        path = step_path(self._folder, step)
        needed = sum(array.nbytes for array in arrays.values())
        with (
            disk_errors(path, "the recording", needed=needed, kept=_KEPT),
            replacing(path, durable=True) as temporary,
        ):
            save_file(arrays, temporary, {"samples": json.dumps(samples)})


def recorder_of(
    config: RunConfig,
    teachers: Mapping[str, Teacher],
    student: TokenTable,
    identity: RunIdentity,
    *,
    done: int,
) -> Recorder | None:
    """What a run records with; None where it does not."""
    if not config.logging.record:
        return None
    return Recorder(
        config.output_dir,
        teachers,
        student=student,
        data_fingerprint=identity.data_fingerprint,
        done=done,
    )


class Recording:
    """Reads what a ``Recorder`` wrote.

    Raises:
        DataError: when there is no recording in the folder of the run.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / RECORDINGS
        try:
            self._facts: JSON = json.loads((self.folder / _FACTS).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{output_dir} holds no recording ({error}); expected the output_dir of a run with "
                "logging.record"
            ) from error
        self.steps = len(list(self.folder.glob("step-*.safetensors")))
        if not self.steps:
            raise DataError(f"{self.folder} holds no step; expected the recording of at least one")

    @property
    def data_fingerprint(self) -> str:
        """Of the data that prompts were taken from."""
        return self._facts["data_fingerprint"]

    @property
    def student_tokenizer(self) -> str:
        """Fingerprint of the tokenizer of who wrote."""
        return self._facts["student_tokenizer"]

    @property
    def teachers(self) -> Sequence[str]:
        """Names of those who were asked."""
        return list(self._facts["teachers"])

    def asked(self, teacher: str) -> JSON:
        """What a teacher was asked for."""
        return self._facts["teachers"][teacher]["asked"]

    def manifest(self, teacher: str) -> Manifest:
        """Who a teacher was."""
        return Manifest.parse(self._facts["teachers"][teacher]["manifest"])

    def tokenizer(self, teacher: str) -> TeacherTokenizer:
        """A teacher's tokenizer.

        Raises:
            TeacherError: when it is not the one of the manifest.
        """
        text = self._facts["teachers"][teacher]["tokenizer"]
        return teacher_tokenizer(teacher, self.manifest(teacher), text)

    def read(
        self, step: int, prompts: Sequence[Prompt], student: TokenTable
    ) -> list[RecordedSample]:
        """The samples of a step (counted from 1), in order.

        Raises:
            DataError: when the step's file is missing or damaged.
        """
        path = step_path(self.folder, step)
        try:
            with safe_open(path, framework="numpy") as opened:
                samples = json.loads(opened.metadata()["samples"])
                arrays: Arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); record the run again, or set max_steps below "
                "this step"
            ) from error
        return [
            _read_sample(f"{at}", sample, arrays, prompts, student)
            for at, sample in enumerate(samples)
        ]


def asked_of(config: TeacherConfig) -> JSON:
    """What the settings of a teacher ask it for, which decides what its scores hold."""
    return {
        "top_k": config.top_k,
        "support": config.support,
        "temperature": config.temperature,
    }


def step_path(folder: Path, step: int) -> Path:
    """The file of a step, counted from 1."""
    return folder / f"step-{step:08d}.safetensors"


def _teacher_facts(teacher: Teacher) -> JSON:
    return {
        "manifest": teacher.manifest.model_dump(mode="json"),
        "tokenizer": teacher.tokenizer.tokenizer.to_str(),
        "asked": asked_of(teacher.config),
    }


def _sample(key: str, example: TrainingExample, arrays: Arrays) -> JSON:
    """Adds the arrays of a sample; the rest of it."""
    rollout = example.rollout
    arrays[f"{key}.prompt_ids"] = rollout.prompt_token_ids
    arrays[f"{key}.completion_ids"] = rollout.completion.token_ids
    if rollout.sampled_logprobs is not None:
        arrays[f"{key}.sampled_logprobs"] = rollout.sampled_logprobs
    if rollout.student_topk_ids is not None:
        arrays[f"{key}.student_topk_ids"] = rollout.student_topk_ids
    return {
        "prompt": rollout.prompt.index,
        "teachers": dict(rollout.prompt.teachers),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "judgements": [
            _judgement(f"{key}.{at}", judgement, arrays)
            for at, judgement in enumerate(example.scores)
        ],
    }


def _judgement(key: str, judgement: AlignedScore, arrays: Arrays) -> JSON:
    completion, topk = judgement.score.completion, judgement.score.topk
    arrays[f"{key}.token_ids"] = completion.token_ids
    arrays[f"{key}.byte_ends"] = completion.byte_ends
    arrays[f"{key}.text"] = np.frombuffer(completion.text, dtype=np.uint8)
    arrays[f"{key}.ids"] = topk.ids
    arrays[f"{key}.logprobs"] = topk.logprobs
    arrays[f"{key}.token_logprobs"] = topk.token_logprobs
    arrays[f"{key}.tail_logprobs"] = topk.tail_logprobs
    return {
        "teacher": judgement.teacher,
        "weight": judgement.weight,
        "manifest_id": judgement.score.manifest_id,
        "marks": dict(completion.marks),
    }


def _read_sample(
    key: str, sample: JSON, arrays: Arrays, prompts: Sequence[Prompt], student: TokenTable
) -> RecordedSample:
    rollout = Rollout(
        prompt=replace(prompts[sample["prompt"]], teachers=sample["teachers"]),
        prompt_token_ids=arrays[f"{key}.prompt_ids"],
        completion=student.sequence(arrays[f"{key}.completion_ids"]),
        sampled_logprobs=arrays.get(f"{key}.sampled_logprobs"),
        finish_reason=sample["finish_reason"],
        policy_version=sample["policy_version"],
        student_topk_ids=arrays.get(f"{key}.student_topk_ids"),
    )
    judgements = (
        _read_judgement(f"{key}.{at}", judgement, arrays)
        for at, judgement in enumerate(sample["judgements"])
    )
    return RecordedSample(rollout, tuple(judgements))


def _read_judgement(key: str, judgement: JSON, arrays: Arrays) -> RecordedJudgement:
    completion = TokenSequence(
        token_ids=arrays[f"{key}.token_ids"],
        byte_ends=arrays[f"{key}.byte_ends"],
        text=arrays[f"{key}.text"].tobytes(),
        marks={int(position): mark for position, mark in judgement["marks"].items()},
    )
    topk = TopKLogprobs(
        ids=arrays[f"{key}.ids"],
        logprobs=arrays[f"{key}.logprobs"],
        token_logprobs=arrays[f"{key}.token_logprobs"],
        tail_logprobs=arrays[f"{key}.tail_logprobs"],
    )
    score = TeacherScore(judgement["manifest_id"], completion, topk)
    return RecordedJudgement(judgement["teacher"], judgement["weight"], score)
