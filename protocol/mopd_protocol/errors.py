"""Errors raised by mopd.

Every class has a ``code`` that a program can test; a ``key`` names the setting, field or file::

    MopdError                          mopd_error
    ├── ConfigError (ValueError)       invalid_config         key: the setting, "student.lora.rank"
    │   ├── MissingPackageError        missing_package        key: the package
    │   └── ResumeError                resume_mismatch        key: the setting that differs
    ├── DataError (ValueError)         invalid_data           key: the file, field or line
    │   ├── TokenizerError             invalid_tokenizer
    │   ├── WireFormatError            invalid_wire_format
    │   ├── WeightsError               incomplete_weights     key: the tensor
    │   ├── VerificationError          contradicting_scores   key: the kind of request
    │   └── CheckpointError            damaged_checkpoint     key: the file
    ├── TeacherError (RuntimeError)    teacher_failed         status: HTTP status or None
    │   ├── TeacherUnavailableError    teacher_unavailable
    │   ├── TeacherMismatchError       teacher_mismatch       key: the fact that differs
    │   ├── InvalidResponseError       invalid_response       key: the field of the response
    │   ├── ServiceError               by cause: queue_full   in mopd_server, as the classes below
    │   ├── SelfCheckError             self_check_failed      key: the pair of scores that differ
    │   └── EngineCrashError            engine_dead
    ├── RankError (RuntimeError)       rank_failed
    ├── TrainingError (RuntimeError)   training_failed
    │   └── DegradationError           student_degraded       key: the metric
    └── DiskError (OSError)            disk_failed            key: the path

A message has the form ``<subject>: <what is wrong> (found <x>, expected <y>). <Fix>.``
"""


class MopdError(Exception):
    """Base class of all errors that mopd raises on purpose; the message is one sentence."""

    code: str = "mopd_error"

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class ConfigError(MopdError, ValueError):
    """A setting is unknown, missing, invalid, or contradicts another setting."""

    code = "invalid_config"


class MissingPackageError(ConfigError):
    """An optional package that the settings need is not installed."""

    code = "missing_package"


class ResumeError(ConfigError):
    """A run cannot be resumed with these settings, data or teachers."""

    code = "resume_mismatch"


class DataError(MopdError, ValueError):
    """Input data is invalid: a line and its format, a token id and its vocabulary."""

    code = "invalid_data"


class TokenizerError(DataError):
    """A tokenizer file is invalid or unsupported."""

    code = "invalid_tokenizer"


class WireFormatError(DataError):
    """A request or response body does not have the wire format."""

    code = "invalid_wire_format"


class WeightsError(DataError):
    """The weights of a model are incomplete, or those of another architecture."""

    code = "incomplete_weights"


class VerificationError(DataError):
    """A teacher's second score of a sequence contradicts the first.

    Not a TeacherError: ``on_error: drop`` must not continue a run with a wrong signal.
    """

    code = "contradicting_scores"


class CheckpointError(DataError):
    """A checkpoint or another file of a run is incomplete or damaged."""

    code = "damaged_checkpoint"


class TeacherError(MopdError, RuntimeError):
    """A teacher did not respond, rejected the request, or returned an invalid response.

    ``status`` is the HTTP status, or ``None`` if there was no response.
    """

    code = "teacher_failed"

    def __init__(self, message: str, *, status: int | None = None, key: str | None = None) -> None:
        super().__init__(message, key=key)
        self.status = status


class TeacherUnavailableError(TeacherError):
    """A teacher is unreachable or not ready."""

    code = "teacher_unavailable"


class TeacherMismatchError(TeacherError):
    """A teacher is not the one that the run expects: name, model, tokenizer or limits differ."""

    code = "teacher_mismatch"


class InvalidResponseError(TeacherError):
    """A teacher's response is malformed or contradicts the request."""

    code = "invalid_response"


class RankError(MopdError, RuntimeError):
    """Another rank failed or is unreachable."""

    code = "rank_failed"


class TrainingError(MopdError, RuntimeError):
    """Training cannot continue: gradients, weights or samples are unusable."""

    code = "training_failed"


class DegradationError(TrainingError):
    """The student degrades: its samples leave what the loss compares, or are no text."""

    code = "student_degraded"


class DiskError(MopdError, OSError):
    """A file could not be written or read: disk full, permissions, or a missing folder."""

    code = "disk_failed"


def message_of(error: BaseException) -> str | None:
    """Return the message and notes of an error of mopd, or of the first in a group of such errors.

    Returns:
        None for any other error, and for a group that contains one.
    """
    notes = getattr(error, "__notes__", [])
    if isinstance(error, BaseExceptionGroup):
        members: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        messages = [message_of(member) for member in members]
        message = None if None in messages else messages[0]
    else:
        message = str(error) if isinstance(error, MopdError) else None
    return None if message is None else " ".join([message, *notes])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the next one if that explains it; the class
    name if the message is empty."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    count = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:count]) or type(error).__name__
