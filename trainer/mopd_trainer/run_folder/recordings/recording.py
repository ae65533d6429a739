"""Recordings: each step's completions and teacher scores on disk, for training without teachers.

A run's ``recordings`` folder contains ``recording.json`` (the data's fingerprint, tokenizers,
manifests and scoring options), a ``.safetensors`` file of rollouts per step, and ``scores``: shards
of a ``ScoreStore``, which a later run can use as its ``score_cache``. A step takes 8 bytes per
student token (and 4 per stored student top-k id), 16 + 8 k bytes and the text per scored token, and
less than 2 kB per sample besides.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mopd_client.score_store import ScoreKey, Shard, load_shard
from mopd_losses.core.loss import Lookahead
from mopd_protocol.errors import CheckpointError
from mopd_protocol.messages import Message
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.runtime.atomic_file import remove_leftovers, replacing
from mopd_protocol.samples import Prompt, Rollout, TeacherScore, later_turn
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RunConfig
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.run_folder.disk_errors import disk_errors
from mopd_trainer.run_folder.recordings.recorded_lookaheads import load_lookaheads, lookahead_arrays
from mopd_trainer.teachers.connect import Teacher
from mopd_trainer.teachers.stored.facts import TeacherFacts, scoring_options

logger = logging.getLogger(__name__)

RECORDINGS = "recordings"
SCORES = "scores"
_FACTS = "recording.json"
_KEPT = "the recordings of earlier steps are complete"

Arrays = dict[str, np.ndarray[Any, Any]]
JSON = dict[str, Any]


@dataclass(frozen=True)
class RecordedScore:
    """A teacher's score of a completion, without its alignment, which depends on the loss."""

    teacher: str
    weight: float
    score: TeacherScore
    lookaheads: tuple[Lookahead, ...] | None = None
    sent_tokens: int | None = None
    """Tokens of the completion that the teacher scored, from the first; None: all."""


@dataclass(frozen=True)
class RecordedSample:
    """A completion and its scores."""

    rollout: Rollout
    scores: tuple[RecordedScore, ...]


class Recorder:
    """Writer of a run's recordings.

    Args:
        done: number of completed steps; recordings of later steps are removed.
        conversations: record the prompts, which an agent has extended.

    Raises:
        DiskError: if the disk is full or not writable.
    """

    def __init__(
        self,
        output_dir: Path,
        teachers: Mapping[str, Teacher],
        *,
        student: TokenTable,
        data_fingerprint: str,
        done: int,
        conversations: bool = False,
    ) -> None:
        self._conversations = conversations
        self._folder = output_dir / RECORDINGS
        self._teachers = teachers
        self._remove_steps_after(done)
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
        """Record the examples of a step (counted from 1) atomically.

        Raises:
            DiskError: if the disk is full or not writable.
        """
        arrays: Arrays = {}
        samples = [_sample(f"{index}", sample, arrays) for index, sample in enumerate(examples)]
        if self._conversations:
            for sample, example in zip(samples, examples, strict=True):
                sample["conversation"] = _conversation(example.rollout.prompt)
        for index, example in enumerate(examples):
            for each in example.scores:
                if each.lookaheads is not None:
                    key = f"{index}.{each.teacher}"
                    arrays |= lookahead_arrays(key, each.lookaheads, each.score.topk.k)
        shards = self._add_scores(samples, examples)
        body = save(arrays, {"samples": json.dumps(samples)})
        path = step_path(self._folder, step)
        needed = len(body) + sum(len(shard.body) for shard in shards)
        with disk_errors(path, "the recording", needed=needed, kept=_KEPT):
            for shard in shards:
                shard.save(self._folder / SCORES, durable=True)
            with replacing(path, durable=True) as temporary:
                temporary.write_bytes(body)

    def _add_scores(
        self, samples: Sequence[JSON], examples: Sequence[TrainingExample]
    ) -> list[Shard]:
        """Encode all scores in one shard per manifest and ``k``; add references to the samples."""
        groups: dict[tuple[str, int], list[tuple[JSON, AlignedScore]]] = {}
        for sample, example in zip(samples, examples, strict=True):
            for aligned in example.scores:
                score = aligned.score
                reference: JSON = {"teacher": aligned.teacher, "weight": aligned.weight}
                sent = len(aligned.teacher_input.completion)
                if sent < len(example.rollout.completion):
                    reference["sent_tokens"] = sent
                sample["scores"].append(reference)
                group = groups.setdefault((score.manifest_id, score.topk.k), [])
                group.append((reference, aligned))
        shards: list[Shard] = []
        for (manifest_id, _), members in groups.items():
            keys = [self._key(aligned) for _, aligned in members]
            shard = Shard.of(manifest_id, keys, [aligned.score for _, aligned in members])
            for row, (reference, _) in enumerate(members):
                reference |= {"shard": shard.name, "row": row}
            shards.append(shard)
        return shards

    def _key(self, aligned: AlignedScore) -> str | None:
        """Return the digest under which a ``ScoreStore`` finds the score."""
        teacher = self._teachers.get(aligned.teacher)
        if teacher is None or teacher.config.control is not None:
            return None  # not a score that another run may use
        sequence = aligned.teacher_input.request
        request = LogprobsRequest(
            sequences=[sequence],
            top_k=teacher.config.top_k,
            temperature=teacher.config.scored_temperature,
            logprobs_dtype=teacher.config.logprobs_dtype,
        )
        return ScoreKey.of(aligned.score.manifest_id, request, sequence).digest

    def _remove_steps_after(self, done: int) -> None:
        """Remove later steps with their shards, and files of interrupted writes."""
        scores = self._folder / SCORES
        for folder in (self._folder, *scores.glob("*")):
            remove_leftovers(folder)
        kept_shards: set[str] = set()
        for path in self._folder.glob("step-*.safetensors"):
            if path > step_path(self._folder, done):
                path.unlink()
            else:
                kept_shards |= _shard_names(path)
        for path in scores.glob("*/*.safetensors"):
            if path.relative_to(scores).as_posix() not in kept_shards:
                path.unlink()


def recorder_of(
    config: RunConfig,
    teachers: Mapping[str, Teacher],
    student: TokenTable,
    identity: RunIdentity,
    *,
    done: int,
) -> Recorder | None:
    """Create the run's recorder; None without ``logging.record``."""
    if not config.logging.record:
        return None
    return Recorder(
        config.output_dir,
        teachers,
        student=student,
        data_fingerprint=identity.data_fingerprint,
        done=done,
        conversations=config.rollout.agent is not None,
    )


class Recording:
    """Reader of the recordings that a ``Recorder`` wrote.

    Raises:
        CheckpointError: if the run's folder has no recording.
    """

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / RECORDINGS
        path = self.folder / _FACTS
        try:
            self._facts: JSON = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{output_dir}: recording not found ({error}). Set replay to the output_dir of a "
                "run with logging.record",
                key=str(path),
            ) from error
        self.steps = len(list(self.folder.glob("step-*.safetensors")))
        if not self.steps:
            raise CheckpointError(
                f"{self.folder}: no recorded step (found 0, expected at least 1)",
                key=str(self.folder),
            )

    @property
    def data_fingerprint(self) -> str:
        """Fingerprint of the prompts' data."""
        return self._facts["data_fingerprint"]

    @property
    def student_tokenizer(self) -> str:
        """Fingerprint of the student's tokenizer."""
        return self._facts["student_tokenizer"]

    @property
    def teachers(self) -> Sequence[str]:
        """Names of the teachers."""
        return list(self._facts["teachers"])

    def teacher(self, name: str) -> TeacherFacts:
        """Return a teacher's manifest, tokenizer and scoring options."""
        return TeacherFacts.parse(self._facts["teachers"][name])

    def read(
        self, step: int, prompts: Sequence[Prompt], student: TokenTable
    ) -> list[RecordedSample]:
        """Load the samples of a step (counted from 1), in order.

        Raises:
            CheckpointError: if a file of the step is missing or damaged.
        """
        samples, arrays = _load_step(step_path(self.folder, step))
        shards: dict[str, LogprobsResponse] = {}
        for reference in (reference for sample in samples for reference in sample["scores"]):
            name = reference["shard"]
            if name not in shards:
                shards[name] = _load_scores(self.folder / SCORES / name)
        return [
            RecordedSample(
                _load_rollout(f"{index}", sample, arrays, prompts, student),
                tuple(
                    RecordedScore(
                        reference["teacher"],
                        reference["weight"],
                        shards[reference["shard"]].scores[reference["row"]],
                        load_lookaheads(f"{index}.{reference['teacher']}", arrays),
                        reference.get("sent_tokens"),
                    )
                    for reference in sample["scores"]
                ),
            )
            for index, sample in enumerate(samples)
        ]


def step_path(folder: Path, step: int) -> Path:
    """Return the file of a step, counted from 1."""
    return folder / f"step-{step:08d}.safetensors"


def _teacher_facts(teacher: Teacher) -> JSON:
    text = teacher.tokenizer.tokenizer.to_str()
    return TeacherFacts(teacher.manifest, text, scoring_options(teacher.config)).plain()


def _sample(key: str, example: TrainingExample, arrays: Arrays) -> JSON:
    """Add a rollout's arrays to ``arrays``; return its JSON, with an empty list of scores."""
    rollout = example.rollout
    arrays[f"{key}.prompt_ids"] = rollout.prompt_token_ids
    arrays[f"{key}.completion_ids"] = rollout.completion.token_ids
    if rollout.sampled_logprobs is not None:
        arrays[f"{key}.sampled_logprobs"] = rollout.sampled_logprobs
    if rollout.student_topk_ids is not None:
        arrays[f"{key}.student_topk_ids"] = rollout.student_topk_ids
    if rollout.entropies is not None:
        arrays[f"{key}.entropies"] = rollout.entropies
    rewards = {"rewards": dict(rollout.rewards)} if rollout.rewards else {}
    return {
        "prompt": rollout.prompt.index,
        "teachers": dict(rollout.prompt.teachers),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "corrected_tokens": rollout.corrected_tokens,
        **rewards,
        "sample": rollout.sample,
        "scores": [],
    }


def _conversation(prompt: Prompt) -> JSON:
    messages = [message.model_dump() for message in prompt.messages]
    return {"messages": messages, "tools": prompt.tools, "turn": prompt.turn}


def _load_prompt(sample: JSON, prompts: Sequence[Prompt]) -> Prompt:
    prompt = replace(prompts[sample["prompt"]], teachers=sample["teachers"])
    recorded = sample.get("conversation")
    if recorded is None:
        return prompt
    messages = tuple(Message.model_validate(each) for each in recorded["messages"])
    return later_turn(prompt, messages, tools=tuple(recorded["tools"]), turn=recorded["turn"])


def _shard_names(path: Path) -> set[str]:
    """Return the shards of a step; none if the step is damaged, and thus cannot be replayed."""
    try:
        samples, _ = _load_step(path)
    except CheckpointError as error:
        logger.warning("%s", error)
        return set()
    return {reference["shard"] for sample in samples for reference in sample["scores"]}


def _load_step(path: Path) -> tuple[list[JSON], Arrays]:
    try:
        with safe_open(path, framework="numpy") as opened:
            samples = json.loads(opened.metadata()["samples"])
            return samples, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _load_scores(path: Path) -> LogprobsResponse:
    try:
        return load_shard(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded ({error}). Record the run again, or set max_steps below this "
        "step",
        key=str(path),
    )


def _load_rollout(
    key: str, sample: JSON, arrays: Arrays, prompts: Sequence[Prompt], student: TokenTable
) -> Rollout:
    return Rollout(
        prompt=_load_prompt(sample, prompts),
        prompt_token_ids=arrays[f"{key}.prompt_ids"],
        completion=student.sequence(arrays[f"{key}.completion_ids"]),
        sampled_logprobs=arrays.get(f"{key}.sampled_logprobs"),
        finish_reason=sample["finish_reason"],
        policy_version=sample["policy_version"],
        student_topk_ids=arrays.get(f"{key}.student_topk_ids"),
        corrected_tokens=tuple(sample.get("corrected_tokens", ())),
        entropies=arrays.get(f"{key}.entropies"),
        rewards=sample.get("rewards", {}),
        sample=sample.get("sample", 0),
    )
