"""``RunIdentity``: what makes a run that run; a checkpoint of another one is not gone on from.

Where things are, how they are kept and how fast it goes may change between two parts of a run;
what is trained, on what, and from which random numbers may not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig

#: Settings that decide nothing of what is trained, by their dotted keys; ``*`` is any teacher. The
#: model is not among those compared: its weights come from the checkpoint, and its tokenizer and
#: its shapes are compared when they do. What a teacher is stands in its manifest.
_INCIDENTAL = frozenset(
    {
        "accept_changed_settings",
        "accept_changed_teachers",
        "best_checkpoint_metric",
        "best_checkpoint_mode",
        "data.answer_key",
        "data.default_teacher",
        "data.on_bad_line",
        "data.prompts",
        "data.question_key",
        "data.teacher_key",
        "exp_name",
        "keep_checkpoints",
        "logging",
        "logging_steps",
        "output_dir",
        "projection_cache",
        "resources",
        "resume_from_checkpoint",
        "rollout.scoring",
        "rollout.vllm",
        "save_steps",
        "score_cache",
        "student.device",
        "student.gradient_checkpointing",
        "student.max_skipped_in_a_row",
        "student.model",
        "student.on_nonfinite",
        "student.revision",
        "student.rows_per_block",
        "student.sharding",
        "student.skip_grad_norm_above",
        "student.tokens_per_micro_batch",
        "student.trust_remote_code",
        "teacher_wait_seconds",
        "teachers.*.api_key_env",
        "teachers.*.deadline_seconds",
        "teachers.*.device",
        "teachers.*.dtype",
        "teachers.*.hedge_after_quantile",
        "teachers.*.hedge_after_seconds",
        "teachers.*.max_concurrency",
        "teachers.*.model",
        "teachers.*.on_error",
        "teachers.*.placement",
        "teachers.*.require_all_replicas",
        "teachers.*.revision",
        "teachers.*.serve",
        "teachers.*.timeout_seconds",
        "teachers.*.tokenizer",
        "teachers.*.url",
    }
)

_TOLD = 4  # differences in one sentence


@dataclass(frozen=True)
class RunIdentity:
    """The settings that decide what is trained, the seed among them, and the data's fingerprint."""

    settings: Mapping[str, Any]  # dotted key -> plain value
    data_fingerprint: str
    prompts: int

    @classmethod
    def of(cls, config: RunConfig, prompts: Sequence[Prompt]) -> "RunIdentity":
        """The identity of a run on these prompts."""
        settings = _flat(config.model_dump(mode="json"))
        if config.student.min_learning_rate_ratio == 1:
            del settings["max_steps"]  # nothing but the learning rate's way down depends on it
        return cls(settings, _fingerprint(prompts), len(prompts))

    def require_same(self, saved: "RunIdentity", *, source: str) -> None:
        """Compares with what a checkpoint says; ``source`` names it.

        A setting that one of the two versions of this program did not have is not compared.

        Raises:
            ConfigError: tells what differs, and what to do.
        """
        found = self._differences(saved)
        if found:
            more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
            raise ConfigError(
                f"{source} is of another run: {', '.join(found[:_TOLD])}{more}; change it back, or "
                "go on with what would then be two runs in one by accept_changed_settings=true"
            )

    def _differences(self, saved: "RunIdentity") -> list[str]:
        ours, theirs = (_teachers(identity.settings) for identity in (self, saved))
        found = [f"teacher {name!r} was not there" for name in sorted(ours - theirs)]
        found += [f"teacher {name!r} is not there" for name in sorted(theirs - ours)]
        found += [
            f"{key} was {saved.settings[key]!r}, is {value!r}"
            for key, value in self.settings.items()
            if key in saved.settings and saved.settings[key] != value
        ]
        found += [f"{key} was not set" for key in _unset(saved.settings, in_place_of=self.settings)]
        found += [f"{key} is not set" for key in _unset(self.settings, in_place_of=saved.settings)]
        if self.data_fingerprint != saved.data_fingerprint:
            found.append(
                f"the data was {saved.prompts:,} prompts with fingerprint "
                f"{saved.data_fingerprint[:12]}, is {self.prompts:,} with "
                f"{self.data_fingerprint[:12]}"
            )
        return found


def _flat(values: Mapping[str, Any], prefix: str = "", pattern: str = "") -> dict[str, Any]:
    """Dotted key -> value of the settings that count; ``pattern`` is the key with ``*``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key, general = prefix + name, pattern + ("*" if pattern == "teachers." else name)
        if general in _INCIDENTAL:
            continue
        if isinstance(value, dict):
            found |= _flat(value, f"{key}.", f"{general}.")
        else:
            found[key] = value
    return found


def _unset(settings: Mapping[str, Any], *, in_place_of: Mapping[str, Any]) -> list[str]:
    """Keys without a value here that are a section there."""
    sections = {key.rpartition(".")[0] for key in in_place_of}
    return [key for key, value in settings.items() if value is None and key in sections]


def _teachers(settings: Mapping[str, Any]) -> set[str]:
    """Teachers by the one setting that each of them has."""
    ending = ".loss.type"
    return {
        key.removeprefix("teachers.").removesuffix(ending)
        for key in settings
        if key.startswith("teachers.") and key.endswith(ending)
    }


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of what the student reads and who judges it, in order; not of how the lines spell it."""
    digest = hashlib.sha256()
    for prompt in prompts:
        messages = [message.model_dump() for message in prompt.messages]
        line = [messages, sorted(prompt.teachers.items()), prompt.answer]
        digest.update(json.dumps(line).encode() + b"\n")
    return digest.hexdigest()
