"""Optional packages that a run's settings need, checked before the run starts."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from mopd_protocol.errors import MissingPackageError
from mopd_trainer.config.run import RunConfig

#: Experiment trackers of ``LoggingConfig``, by package.
TRACKERS = ("wandb", "trackio")


class Requirement(NamedTuple):
    """A package, the setting that needs the package, how to install it, and an alternative."""

    package: str
    setting: str
    install: str
    alternative: str


PEFT = Requirement("peft", "student.lora", "'.[lora]'", "remove the setting")
RAY = Requirement("ray", "resources", "'.[ray]'", "remove the section")
#: Packages of the rollout engines.
_ENGINES = {
    "vllm": Requirement("vllm", "rollout.engine=vllm", "'.[vllm]'", "use 'transformers'"),
}
#: Packages of ``student.attn_implementation``; transformers has the same kernels in ``kernels``.
_ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "kernels"),
}


def require_packages(config: RunConfig) -> None:
    """Check that all packages for these settings are installed.

    For a run on Ray, only packages of this process are checked; other machines may differ.

    Raises:
        MissingPackageError: if a package is not installed.
    """
    for requirement in _requirements(config):
        require_package(requirement)


def require_package(requirement: Requirement) -> None:
    """Raise MissingPackageError if the package is not installed."""
    package, setting, install, alternative = requirement
    if find_spec(package) is None:
        raise MissingPackageError(
            f"{setting}: package {package} not found. Run pip install {install}, or {alternative}.",
            key=package,
        )


def _requirements(config: RunConfig) -> Iterator[Requirement]:
    for tracker in TRACKERS:
        if getattr(config.logging, tracker):
            yield Requirement(tracker, f"logging.{tracker}", tracker, "remove the setting")
    if config.resources is not None:
        return
    if config.student.lora is not None:
        yield PEFT
    attention = config.student.attn_implementation
    if attention in _ATTENTION and find_spec("kernels") is None:
        package, install = _ATTENTION[attention]
        yield Requirement(
            package, f"student.attn_implementation={attention}", install, "use 'sdpa'"
        )
    if config.samples_rollouts and config.rollout.engine in _ENGINES:
        yield _ENGINES[config.rollout.engine]
