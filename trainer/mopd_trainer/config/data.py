"""``DataConfig``: the prompts of a run."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mopd_protocol.samples import Source
from mopd_trainer.config.settings import Incidental, Settings, invalid


class DataConfig(Settings):
    """Prompts, source of the completions, and the teacher of each line.

    Rejected: an ``on_policy_fraction`` that never uses ``source``, ``subset`` without ``split``,
    and ``turns: all`` with ``answer_key``.
    """

    prompts: Incidental[Path]
    """File of JSONL, JSON (an array) or parquet, in a format of the quickstart (``messages``,
    ``prompt``, ``prompt`` and ``completion``, ``conversations``, ``instruction``) or with the keys
    named below; with ``split``, a dataset of Hugging Face. Parquet and datasets need
    ``pip install '.[data]'``."""
    split: Incidental[str | None] = None
    """Split of a dataset (``train``); ``prompts`` is then its name on the hub or its folder."""
    subset: Incidental[str | None] = None
    """Configuration of the dataset on the hub (``main``), if it has several."""
    ignored_keys: Incidental[Literal["all"] | tuple[str, ...]] = ()
    """Keys of rows and messages that are read as if the data had none. Other unknown keys are
    invalid, so that nothing that should change a prompt (``images``) is lost; ``all`` accepts every
    unknown key."""
    turns: Incidental[Literal["last", "all"]] = "last"
    """Turns of a conversation that are trained: ``last`` completes the last message; ``all`` also
    completes the conversation before each earlier message of the assistant. With reference answers
    a turn's completion is what the student's template makes of the message, tool calls and thinking
    included. ``teacher`` in a message is the teacher of its turn."""
    source: Source = "rollout"
    """Source of completions: ``rollout`` (sampled from the student) or ``answers`` (each line's
    reference answer)."""
    on_policy_fraction: float | None = Field(default=None, ge=0, le=1)
    """Fraction of a step's prompts that the student completes; the rest use reference answers.
    Default: 1 for ``rollout``, 0 for ``answers``."""
    teacher_key: Incidental[str | None] = None
    """Key of a line's teacher: a name, or a mapping of names to weights. Default: the first of
    ``teacher``, ``data_source``, ``tag``, ``dataset`` in the line."""
    default_teacher: Incidental[str | None] = None
    """Teacher of lines without one; if not set, such lines are invalid."""
    question_key: Incidental[str | None] = None
    """Key of the user message, or of a list of messages, for data in another format."""
    answer_key: Incidental[str | None] = None
    """Key of the reference answer. Default: the last message of a conversation if it is the
    assistant's, ``completion`` or ``output``. If the run does not use reference answers, they are
    only logged next to the completion."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, with an order derived from ``seed``."""
    on_bad_line: Incidental[Literal["fail", "skip"]] = "fail"
    """Invalid lines: ``fail`` raises an error; ``skip`` drops the line and logs the number of
    dropped lines and the first error."""

    @model_validator(mode="after")
    def _validate_source(self) -> "DataConfig":
        if self.on_policy_fraction == (0 if self.source == "rollout" else 1):
            expected = "answers" if self.source == "rollout" else "rollout"
            raise invalid(
                "on_policy_fraction",
                f"source '{self.source}' is never used (found {self.on_policy_fraction:g}). "
                f"Set data.source to '{expected}'.",
            )
        if self.subset is not None and self.split is None:
            raise invalid("subset", "only a dataset has subsets. Set data.split, or remove it.")
        if self.turns == "all" and self.answer_key is not None:
            raise invalid(
                "turns",
                "'all' takes the reference answers from the conversation (found data.answer_key "
                f"{self.answer_key!r}). Remove it, or set data.turns to 'last'.",
            )
        return self

    @property
    def rollout_share(self) -> float:
        """Fraction of prompts that the student completes."""
        if self.on_policy_fraction is None:
            return 1.0 if self.source == "rollout" else 0.0
        return self.on_policy_fraction

    def drops(self, key: str) -> bool:
        """Return True for a key that is named in ``ignored_keys``."""
        return self.ignored_keys != "all" and key in self.ignored_keys

    def ignores(self, key: str) -> bool:
        """Return True for a key that the run does not use."""
        return self.ignored_keys == "all" or key in self.ignored_keys

    @property
    def uses_reference_answers(self) -> bool:
        """True if some prompts are trained on their reference answers."""
        return self.rollout_share < 1
