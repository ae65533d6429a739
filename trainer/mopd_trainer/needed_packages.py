"""Packages that a run's settings ask for and that the trainer does without otherwise."""

from collections.abc import Iterator
from importlib.util import find_spec

from mopd_protocol.errors import ConfigError
from mopd_trainer.config import RunConfig
from mopd_trainer.trackers import TRACKERS


def require_packages(config: RunConfig) -> None:
    """All of them can be found, so that a run does not meet its teachers first and then end.

    Of a run on Ray only what this process itself imports: machines of a cluster may differ.

    Raises:
        ConfigError: when one is not installed.
    """
    for package, setting, install, otherwise in _needed(config):
        if find_spec(package) is None:
            raise ConfigError(
                f"{setting}, but {package} is not installed; pip install {install}, or {otherwise}"
            )


def _needed(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Of each: its name, the setting that asks for it, what to install, and what else to do."""
    for tracker in TRACKERS:
        if getattr(config.logging, tracker):
            yield tracker, f"logging.{tracker} is on", tracker, "leave the setting out"
    if config.resources is not None:
        return
    if config.student.lora is not None:
        yield "peft", "student.lora is set", "'mopd[lora]'", "leave the setting out"
    writes = config.data.rollout_share > 0 and config.replay is None
    if writes and config.rollout.engine == "vllm":
        otherwise = "set rollout.engine to 'transformers'"
        yield "vllm", "rollout.engine is 'vllm'", "'mopd[vllm]'", otherwise
