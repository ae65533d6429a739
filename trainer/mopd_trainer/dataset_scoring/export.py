"""``export``: stored scores as the rows that other trainers read, for the teacher's vocabulary.

``axolotl``: a tokenized data set of its KD plugin. Position ``p`` has the teacher's distribution of
token ``p + 1``, normalised over the top-k, as ``LigerFusedLinearKLTopKLogprobFunction`` compares it
with the student's logits at ``p``; positions without a target are empty.

``trl``: the samples of ``AsyncDistillationTrainer``, as a ``rollout_worker`` yields them. Position
``p`` has the distribution of token ``p`` itself, most likely first, and the realised token if it is
not among them; missing entries are id -1. TRL 1.16 has no trainer that reads scores from a file.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.runtime.atomic_file import replacing
from mopd_protocol.samples import Prompt, TeacherScore
from mopd_trainer.dataset_scoring.requests import Row, read_rows
from mopd_trainer.dataset_scoring.settings import ScoringJob
from mopd_trainer.dataset_scoring.student_texts import StudentTexts, read_student
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.stored.folder import Rejection, ScoreFolder

JSON = dict[str, Any]
#: Label of a token that is not trained.
_NOT_TRAINED = -100
#: Log-probability of a missing entry, whose id is -1: JSON has no infinity.
_MISSING = -1e9


def export(
    data: Path, folder: Path, form: str, student: str | None, overrides: Sequence[str] = ()
) -> tuple[Path, int]:
    """Write ``FORM.jsonl`` into the folder of the scores, one line for each row and teacher.

    Rows that a teacher rejected are skipped.

    Args:
        data: what was scored.
        form: ``axolotl`` or ``trl``.
        student: model folder or hub name; its chat template renders the prompts.
        overrides: settings of the data.

    Returns:
        The path, and the number of lines.

    Raises:
        ConfigError: if the student's vocabulary is not that of every teacher.
        DataError: if a row has no score; ``key`` is ``file:row``.
    """
    if student is None:
        raise ConfigError(
            "student: missing. Add --student MODEL, the student that will be trained.",
            key="student",
        )
    scores = ScoreFolder.open(folder)
    try:
        identity = read_student(student)
        _require_vocabulary(scores, identity, student)
        job = ScoringJob.stored(data, scores, overrides)
        path, count = folder / f"{form}.jsonl", 0
        with replacing(path) as temporary, temporary.open("w") as file:
            for line in _lines(job, scores, identity, FORMS[form]):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                count += 1
        return path, count
    finally:
        scores.close()


def axolotl_row(teacher: str, prompt: Prompt, prompt_ids: list[int], score: TeacherScore) -> JSON:
    """Return a row of axolotl's KD plugin."""
    completion = score.token_ids.tolist()
    before, behind = len(prompt_ids) - 1, 1  # positions that predict no token of the completion
    ids, logprobs = _entries(score)
    normalised = [row - np.logaddexp.reduce(row) for row in logprobs]
    return {
        "input_ids": [*prompt_ids, *completion],
        "attention_mask": [1] * (len(prompt_ids) + len(completion)),
        "labels": [_NOT_TRAINED] * len(prompt_ids) + completion,
        "target_token_ids": _padded(before, [row.tolist() for row in ids], behind, []),
        "target_logprobs": _padded(before, [_short(row) for row in normalised], behind, []),
        "target_mask": _padded(before, [[1] * len(row) for row in ids], behind, []),
    }


def trl_row(teacher: str, prompt: Prompt, prompt_ids: list[int], score: TeacherScore) -> JSON:
    """Return a sample of TRL's ``AsyncDistillationTrainer``."""
    completion = score.token_ids.tolist()
    width = score.topk.k + 1
    all_ids: list[list[int]] = []
    all_logprobs: list[list[float]] = []
    for token, value, ids, logprobs in zip(
        completion, score.logprobs, *_entries(score), strict=True
    ):
        if token not in ids:
            ids, logprobs = np.append(ids, token), np.append(logprobs, value)
        missing = width - len(ids)
        all_ids.append(ids.tolist() + [-1] * missing)
        all_logprobs.append(_short(logprobs) + [_MISSING] * missing)
    before = len(prompt_ids)
    return {
        "input_ids": [*prompt_ids, *completion],
        "completion_mask": [0] * before + [1] * len(completion),
        "teacher_topk_ids": _padded(before, all_ids, 0, [-1] * width),
        "teacher_topk_logprobs": _padded(before, all_logprobs, 0, [_MISSING] * width),
        "teacher_id": teacher,
        "prompt_id": prompt.index,
        "metrics": {},
    }


FORMS: dict[str, Callable[[str, Prompt, list[int], TeacherScore], JSON]] = {
    "axolotl": axolotl_row,
    "trl": trl_row,
}


def _require_vocabulary(scores: ScoreFolder, identity: StudentIdentity, student: str) -> None:
    for name, facts in scores.teachers.items():
        table = facts.tokenizer(name).table
        if table.fingerprint != identity.table.fingerprint:
            raise ConfigError(
                f"export: student {student!r} has another vocabulary than teacher {name!r}, "
                f"{facts.manifest.model} (found tokenizer {identity.table.fingerprint[:12]}, "
                f"expected {table.fingerprint[:12]}), and other trainers compare token ids. Choose "
                "a student with the teacher's tokenizer, or train with mopd.",
                key="student",
            )
        end = table.roles.end_of_turn
        if end not in identity.table.roles.ending:
            raise ConfigError(
                f"export: student {student!r} does not end completions with the token of teacher "
                f"{name!r} (found {identity.table.roles.ending}, expected {end}). Choose a student "
                "with the teacher's ends, or train with mopd.",
                key="student",
            )
    if scores.student not in (None, identity.table.fingerprint):
        raise ConfigError(
            f"export: scored for another student than {student!r} (found tokenizer "
            f"{identity.table.fingerprint[:12]}, expected {str(scores.student)[:12]}).",
            key="student",
        )


def _lines(
    job: ScoringJob,
    scores: ScoreFolder,
    identity: StudentIdentity,
    form: Callable[[str, Prompt, list[int], TeacherScore], JSON],
) -> Iterator[JSON]:
    manifests = {name: facts.manifest for name, facts in scores.teachers.items()}
    texts = None
    if scores.student is not None:
        encoders = {n: facts.tokenizer(n).encoder for n, facts in scores.teachers.items()}
        texts = StudentTexts(identity, encoders)
    for row in read_rows(job, manifests, texts):
        prompt_ids = identity.prompt_token_ids(row.prompt.messages, row.prompt.tools)
        row_scores = scores.read([*row.keys.values()])
        for name, score in zip(row.keys, row_scores, strict=True):
            if score is None:
                raise _unscored(job, row, name)
            if not isinstance(score, Rejection):
                yield form(name, row.prompt, prompt_ids, score)


def _unscored(job: ScoringJob, row: Row, teacher: str) -> DataError:
    path = f"{job.data.prompts}:{row.number}"
    return DataError(
        f"{path}: no score of teacher {teacher!r} in {job.output}. Complete the scores with mopd "
        "score and the same data.",
        key=path,
    )


def _entries(score: TeacherScore) -> tuple[list[Any], list[Any]]:
    """Return the ids and log-probabilities of each row's top-k, without missing entries."""
    rows = [ids >= 0 for ids in score.topk.ids]
    ids = [row[kept] for row, kept in zip(score.topk.ids, rows, strict=True)]
    return ids, [row[kept] for row, kept in zip(score.topk.logprobs, rows, strict=True)]


def _padded(before: int, rows: list[Any], behind: int, empty: list[Any]) -> list[Any]:
    return [empty] * before + rows + [empty] * behind


def _short(logprobs: Any) -> list[float]:
    """Return float32 numbers with the digits that they have."""
    return [float(f"{value:.9g}") for value in logprobs.tolist()]
