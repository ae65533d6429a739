"""Packages that a run's settings ask for and that the trainer does without otherwise."""

from collections.abc import Iterator
from importlib.util import find_spec

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.run import RunConfig

#: Experiment trackers that ``logging`` can switch on, by package.
TRACKERS = ("wandb", "trackio")

#: Of each: its name, the setting that asks for it, what to install, and what else to do.
Needed = tuple[str, str, str, str]

PEFT: Needed = ("peft", "student.lora is set", "'mopd[lora]'", "leave the setting out")
_VLLM: Needed = (
    "vllm",
    "rollout.engine is 'vllm'",
    "'mopd[vllm]'",
    "set rollout.engine to 'transformers'",
)


def require_packages(config: RunConfig) -> None:
    """All of them can be found, so that a run does not meet its teachers first and then end.

    Of a run on Ray only what this process itself imports: machines of a cluster may differ.

    Raises:
        ConfigError: when one is not installed.
    """
    for needed in _needed(config):
        require_package(needed)


def require_package(needed: Needed) -> None:
    """Raises ConfigError when it is not installed."""
    package, setting, install, otherwise = needed
    if find_spec(package) is None:
        raise ConfigError(
            f"{setting}, but {package} is not installed; pip install {install}, or {otherwise}"
        )


def _needed(config: RunConfig) -> Iterator[Needed]:
    for tracker in TRACKERS:
        if getattr(config.logging, tracker):
            yield tracker, f"logging.{tracker} is on", tracker, "leave the setting out"
    if config.resources is not None:
        return
    if config.student.lora is not None:
        yield PEFT
    if config.samples_rollouts and config.rollout.engine == "vllm":
        yield _VLLM
