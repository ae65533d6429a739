"""Whether the student's chat template renders the data: found before a run, not in its middle."""

from collections.abc import Sequence
from pathlib import Path

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.student_identity import StudentIdentity

#: Prompts that are rendered, from the first on: a second or two of rendering.
RENDERED = 1_000


def require_renderable(
    prompts: Sequence[Prompt], student: StudentIdentity, *, source: Path
) -> None:
    """Renders the first ``RENDERED`` prompts.

    Raises:
        DataError: names the file and the first prompt that the template refuses.
    """
    for prompt in prompts[:RENDERED]:
        try:
            student.prompt_token_ids(prompt.messages)
        except DataError as error:
            raise DataError(f"{source}: prompt {prompt.index + 1}: {error}") from error
