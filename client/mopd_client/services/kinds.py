"""``SERVICE_KINDS``: the table of teacher services. No HTTP here: settings are checked with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mopd_client.services.base import Service

_Create = Callable[[str | None, str | None, str | None], "Service"]


@dataclass(frozen=True)
class ServiceKind:
    """A row of ``SERVICE_KINDS``."""

    title: str
    """Name in messages."""
    create: _Create
    """Create the service from the settings ``tokenizer``, ``model`` and ``revision``."""
    describes_itself: bool
    """The service sends its tokenizer, and identifies its model and revision."""
    any_temperature: bool
    """The service scores at any softmax temperature, not only at 1."""


def _mopd(tokenizer: str | None, model: str | None, revision: str | None) -> "Service":
    from mopd_client.services.mopd import MopdService

    return MopdService()


def _vllm(tokenizer: str | None, model: str | None, revision: str | None) -> "Service":
    from mopd_client.services.vllm import VllmService

    assert tokenizer is not None  # checked with the settings
    return VllmService(tokenizer, model=model, revision=revision)


#: ``kind`` of a teacher -> its service.
SERVICE_KINDS: Mapping[str, ServiceKind] = {
    "mopd": ServiceKind("mopd service", _mopd, describes_itself=True, any_temperature=True),
    "openai": ServiceKind(
        "stock vLLM server", _vllm, describes_itself=False, any_temperature=False
    ),
}
