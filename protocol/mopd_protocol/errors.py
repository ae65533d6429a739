"""The exceptions of the project: one tree, three branches, each also the fitting builtin.

A message says what was found, what was expected, and what to do about it.
"""


class MopdError(Exception):
    """Anything this project refuses to do, told in one sentence."""


class ConfigError(MopdError, ValueError):
    """A setting is unknown, missing or contradicts another one."""


class DataError(MopdError, ValueError):
    """Two things that must agree do not: a line and its format, a token id and its vocabulary."""


class TeacherError(MopdError, RuntimeError):
    """A teacher gave no answer, refused the request, or answered nonsense.

    ``status`` is the HTTP status, or ``None`` when no answer arrived at all.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
