"""Ascend NPUs: torch knows them once ``torch_npu`` is imported, which happens only where asked."""

from importlib import import_module

from mopd_protocol.errors import ConfigError


def import_backend(device: str, *, asked_by: str) -> None:
    """Imports ``torch_npu`` for a device such as ``npu`` or ``npu:1``, and nothing for others.

    Args:
        asked_by: how the refusal begins: where the device stands, for who wrote it there.

    Raises:
        ConfigError: when it is not installed, or does not find the CANN that it needs.
    """
    if device.partition(":")[0] != "npu":
        return
    try:
        import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{asked_by} needs torch_npu, and that cannot be imported "
            f"({str(error).splitlines()[0]}); install the torch_npu that is made for this torch"
        ) from error
