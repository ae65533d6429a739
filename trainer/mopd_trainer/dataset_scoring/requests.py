"""The requests of a row: its reference answer, scored by each of the row's teachers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mopd_client.score_store import ScoreKey
from mopd_protocol.errors import DataError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsRequest, SequenceRequest
from mopd_protocol.samples import Prompt, Rollout, messages_for
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.prompts import stream_prompts
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.dataset_scoring.student_texts import StudentTexts


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the data, and the request of each of its teachers."""

    number: int  # in the file, from 1
    prompt: Prompt
    requests: Mapping[str, SequenceRequest]
    keys: Mapping[str, ScoreKey]
    rollout: Rollout | None = None  # in the tokens of the student, if there is one


def read_rows(
    job: ScoringJob, manifests: Mapping[str, Manifest], student: StudentTexts | None = None
) -> Iterator[Row]:
    """Yield the rows of the data, without loading it at once.

    Args:
        manifests: of the teachers, by name.
        student: sends the texts of its tokens.

    Raises:
        DataError: for an invalid row; ``key`` is ``file:row``.
    """
    options = {name: _options(each) for name, each in job.teachers.items()}
    manifest_ids = {name: manifests[name].manifest_id for name in job.teachers}
    weights = {} if job.routes else dict.fromkeys(job.teachers, 1.0)
    for number, prompt in _prompts(job):
        if weights:
            prompt = replace(prompt, teachers=MappingProxyType(weights))
        rollout = None if student is None else student.rollout(prompt)
        requests: dict[str, SequenceRequest] = {}
        for name in prompt.teachers:
            if student is None or rollout is None:
                request = _request(prompt, name)
            else:
                request = student.request(rollout, name)
            variables = job.teachers[name].chat_template_kwargs
            if variables:
                request = request.model_copy(update={"chat_template_kwargs": variables})
            requests[name] = request
        keys = {
            name: ScoreKey.of(manifest_ids[name], options[name], request)
            for name, request in requests.items()
        }
        yield Row(number, prompt, requests, keys, rollout)


def count_rows(job: ScoringJob) -> int:
    """Return the number of rows; every row is read, so that invalid ones are found first.

    Raises:
        DataError: as ``read_rows``, and if there is no row.
    """
    count = sum(1 for _ in _prompts(job))
    if not count:
        raise DataError(
            f"{job.data.prompts}: no prompts found, expected one JSON object per line",
            key=str(job.data.prompts),
        )
    return count


def _prompts(job: ScoringJob) -> Iterator[tuple[int, Prompt]]:
    routed = job.teachers if job.routes else {}
    return stream_prompts(job.data, routed, unrouted={} if job.routes else job.teachers)


def _request(prompt: Prompt, teacher: str) -> SequenceRequest:
    """Return the request that training sends for a reference answer."""
    if prompt.reply is not None:
        raise DataError(
            f"prompt {prompt.index + 1}: a completion with tool calls or thinking, or one of "
            "several turns, has the text of a student's template. Name the student with --student.",
            key="student",
        )
    return SequenceRequest(
        messages=list(messages_for(prompt, teacher)),
        tools=list(prompt.tools),
        completion=prompt.answer,
        finished=True,
    )


def _options(teacher: TeacherConfig) -> LogprobsRequest:
    """Return the options of a teacher's requests, in a request."""
    return LogprobsRequest(
        sequences=[SequenceRequest(prompt="", completion="")],
        top_k=teacher.top_k,
        temperature=teacher.scored_temperature,
        logprobs_dtype=teacher.logprobs_dtype,
    )
