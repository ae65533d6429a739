"""``TeacherFacts``: the teachers of a recording or of a folder of scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mopd_client.tokenizers.teacher import teacher_tokenizer
from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_trainer.config.teacher import PROMPT_SETTINGS, TeacherConfig

JSON = dict[str, Any]


def scoring_options(config: TeacherConfig) -> JSON:
    """Return the teacher's settings that affect its scores."""
    return {
        "top_k": config.top_k,
        "support": config.support,
        "temperature": config.scored_temperature,
    }


def request_options(config: TeacherConfig) -> JSON:
    """Return these settings, and those that affect which request a score is found by."""
    return {
        **scoring_options(config),
        "chat_template_kwargs": dict(config.chat_template_kwargs),
        "logprobs_dtype": config.logprobs_dtype,
        **{name: getattr(config, name) for name in PROMPT_SETTINGS},
    }


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher's identity, tokenizer and scoring options, as JSON has them."""

    manifest: Manifest
    tokenizer_json: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, values: JSON) -> "TeacherFacts":
        """Read what ``plain`` returned."""
        return cls(Manifest.parse(values["manifest"]), values["tokenizer"], values["options"])

    def plain(self) -> JSON:
        """Return the facts for JSON."""
        return {
            "manifest": self.manifest.model_dump(mode="json"),
            "tokenizer": self.tokenizer_json,
            "options": dict(self.options),
        }

    def tokenizer(self, teacher: str) -> TeacherTokenizer:
        """Build the tokenizer.

        Raises:
            TeacherError: if it is not the manifest's.
        """
        return teacher_tokenizer(teacher, self.manifest, self.tokenizer_json)

    def require_options(self, teacher: str, options: Mapping[str, Any], source: str) -> None:
        """Compare with the options of a run.

        Args:
            source: what the facts belong to, in the error message.

        Raises:
            ConfigError: if one differs; ``key`` is the setting.
        """
        for key, value in options.items():
            if self.options.get(key) != value:  # a setting may be later than the scores
                raise ConfigError(
                    f"teachers.{teacher}.{key} differs from {source} (found {value!r}, expected "
                    f"{self.options.get(key)!r}). Set that value, or score again",
                    key=f"teachers.{teacher}.{key}",
                )
