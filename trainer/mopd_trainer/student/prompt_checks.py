"""Whether the student can read the data and answer it: found before a run, not in its middle."""

from collections.abc import Sequence
from pathlib import Path

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.student.identity import StudentIdentity

#: Prompts that are rendered, from the first on: a second or two of rendering.
RENDERED = 1_000


def require_answerable(
    config: RunConfig, prompts: Sequence[Prompt], student: StudentIdentity
) -> None:
    """Renders the first ``RENDERED`` prompts, and looks whether any leaves room for an answer.

    Raises:
        DataError: names the file and the first prompt that the template refuses.
        ConfigError: when the student is to write, and all of them would be dropped.
    """
    lengths = rendered_lengths(prompts, student, source=config.data.prompts)
    shortest, limit, longest = min(lengths), student.max_length, config.rollout.max_new_tokens
    if config.samples_rollouts and limit is not None and shortest + longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens is {longest:,}, but the student takes {limit:,} tokens with "
            f"the prompt, and the shortest of the first {len(lengths):,} prompts has "
            f"{shortest:,}, so that all would be dropped; lower max_new_tokens"
        )


def rendered_lengths(
    prompts: Sequence[Prompt], student: StudentIdentity, *, source: Path
) -> list[int]:
    """Tokens of each of the first ``RENDERED`` prompts.

    Raises:
        DataError: names the file and the first prompt that the template refuses.
    """
    lengths: list[int] = []
    for prompt in prompts[:RENDERED]:
        try:
            lengths.append(len(student.prompt_token_ids(prompt.messages)))
        except DataError as error:
            raise DataError(f"{source}: prompt {prompt.index + 1}: {error}") from error
    return lengths
