"""Checks before a run: the student renders the prompts, and has room for completions."""

from collections.abc import Sequence
from pathlib import Path

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.student.identity import StudentIdentity

#: Number of prompts to render: about two seconds.
RENDERED = 1_000


def check_prompts(config: RunConfig, prompts: Sequence[Prompt], student: StudentIdentity) -> None:
    """Render the first ``RENDERED`` prompts and check that one leaves room for a completion.

    Raises:
        DataError: for the first prompt that the template rejects, with the file's name; if all
            prompts are longer than the student supports.
        ConfigError: if ``rollout.max_new_tokens`` leaves no prompt room.
    """
    lengths = rendered_lengths(prompts, student, source=config.data.prompts)
    shortest, limit, longest = min(lengths), student.max_length, config.rollout.max_new_tokens
    if limit is not None and shortest >= limit:
        raise DataError(
            f"{config.data.prompts}: no prompt leaves room for a completion (found {shortest:,} "
            f"tokens in the shortest of the first {len(lengths):,} prompts, and the student "
            f"supports {limit:,}). Shorten the prompts, or use a student with a longer context.",
            key="data.prompts",
        )
    if config.samples_rollouts and limit is not None and shortest + longest > limit:
        raise ConfigError(
            f"rollout.max_new_tokens: no prompt leaves room for a completion (found {longest:,}, "
            f"expected at most {limit - shortest:,}: the student supports {limit:,} tokens, and "
            f"the shortest of the first {len(lengths):,} prompts has {shortest:,}). Lower it.",
            key="rollout.max_new_tokens",
        )


def rendered_lengths(
    prompts: Sequence[Prompt], student: StudentIdentity, *, source: Path
) -> list[int]:
    """Return the token counts of the first ``RENDERED`` prompts.

    Raises:
        DataError: for the first prompt that the template rejects, with the file's name.
    """
    lengths: list[int] = []
    for prompt in prompts[:RENDERED]:
        try:
            lengths.append(len(student.prompt_token_ids(prompt.messages, prompt.tools)))
        except DataError as error:
            raise DataError(
                f"{source}: prompt {prompt.index + 1}: {error}", key=str(source)
            ) from error
    return lengths
