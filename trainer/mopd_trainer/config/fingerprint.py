"""``RunIdentity``: fingerprint of settings and data; resuming with a different one is rejected.

Settings marked ``Incidental`` (paths, speed, logging) may change between two parts of a run. The
model is not compared: weights come from the checkpoint, whose tokenizer and shapes are compared
when they are loaded. Teachers are compared by their manifests.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from mopd_protocol.errors import ResumeError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.settings import IncidentalMark

_LISTED = 4  # differences in an error message
#: Compared by ``starting_checkpoint``: a longer run is the most usual change on resume.
_LENGTH = "max_steps"


@dataclass(frozen=True)
class RunIdentity:
    """Settings that affect training, including the seed, and the fingerprint of the data."""

    settings: Mapping[str, Any]  # dotted key -> plain value
    data_fingerprint: str
    prompts: int

    @property
    def max_steps(self) -> int | None:
        """Steps of the run; None in checkpoints of earlier versions without the number."""
        return self.settings.get(_LENGTH)

    @classmethod
    def of(cls, config: RunConfig, prompts: Sequence[Prompt]) -> "RunIdentity":
        """Compute the identity of a run with these prompts."""
        settings = _fingerprinted(config, config.model_dump(mode="json"), "")
        if config.rewards:
            references = json.dumps([dict(each.metadata) for each in prompts], default=str)
            digest = hashlib.sha256(references.encode()).hexdigest()
            settings["rewards"] = [sorted(config.rewards), digest]
        return cls(settings, _data_fingerprint(prompts), len(prompts))

    def require_same(self, saved: "RunIdentity", *, source: str) -> None:
        """Compare with the identity of a checkpoint.

        A setting that only one of the two program versions has is not compared.

        Args:
            source: name of the checkpoint in the error message.

        Raises:
            ResumeError: for a difference; ``key`` is the first setting (or teacher) that differs.
        """
        differences = self._differences(saved)
        if differences:
            more = f" and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
            listing = ", ".join([*differences.values()][:_LISTED])
            raise ResumeError(
                f"{source}: saved by a run with other settings ({listing}{more}). Restore them, or "
                "set accept_changed_settings=true, which mixes two configurations.",
                key=next(iter(differences)),
            )

    def _differences(self, saved: "RunIdentity") -> dict[str, str]:
        """Return dotted key -> description."""
        teachers, saved_teachers = _teachers(self.settings), _teachers(saved.settings)
        differences = {
            f"teachers.{name}": f"teacher {name!r} {change}"
            for change, names in (
                ("was added", teachers - saved_teachers),
                ("was removed", saved_teachers - teachers),
            )
            for name in sorted(names)
        }
        differences |= {
            key: f"{key} was {saved.settings[key]!r}, is {value!r}"
            for key, value in self.settings.items()
            if key in saved.settings and saved.settings[key] != value and key != _LENGTH
        }
        for key in _unset(saved.settings, sections_of=self.settings):
            differences[key] = f"{key} was not set"
        for key in _unset(self.settings, sections_of=saved.settings):
            differences[key] = f"{key} is not set"
        if self.data_fingerprint != saved.data_fingerprint:
            differences["data"] = (
                f"the data was {saved.prompts:,} prompts with fingerprint "
                f"{saved.data_fingerprint[:12]}, is {self.prompts:,} with "
                f"{self.data_fingerprint[:12]}"
            )
        return differences


def _fingerprinted(section: BaseModel, plain: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return dotted key -> plain value of the settings without ``Incidental``."""
    settings: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), prefix + name
        if any(isinstance(mark, IncidentalMark) for mark in field.metadata):
            continue
        if isinstance(value, BaseModel):
            settings |= _fingerprinted(value, plain[name], f"{key}.")
        elif isinstance(value, dict):  # teachers, rewards
            for each, teacher in value.items():
                settings |= _fingerprinted(teacher, plain[name][each], f"{key}.{each}.")
        else:
            settings[key] = plain[name]
    return settings


def _unset(settings: Mapping[str, Any], *, sections_of: Mapping[str, Any]) -> list[str]:
    """Return keys that are null in one mapping and a section in the other."""
    sections = {key.rpartition(".")[0] for key in sections_of}
    return [key for key, value in settings.items() if value is None and key in sections]


def _teachers(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the teachers, each of which has ``loss.type``."""
    suffix = ".loss.type"
    return {
        key.removeprefix("teachers.").removesuffix(suffix)
        for key in settings
        if key.startswith("teachers.") and key.endswith(suffix)
    }


def _data_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash messages, teachers and reference answers in order; the spelling of lines is ignored."""
    digest = hashlib.sha256()
    for prompt in prompts:
        messages = [message.model_dump() for message in prompt.messages]
        line: list[Any] = [messages, sorted(prompt.teachers.items()), prompt.answer]
        if prompt.teacher_messages:
            own = sorted(prompt.teacher_messages.items())
            line.append([(name, [each.model_dump() for each in texts]) for name, texts in own])
        if prompt.tools or prompt.reply is not None:
            line += [prompt.tools, prompt.reply and prompt.reply.model_dump(), prompt.turn]
        digest.update(json.dumps(line).encode() + b"\n")
    return digest.hexdigest()
