"""Ascend NPUs: torch supports NPUs once ``torch_npu`` is imported, which is done on request."""

from importlib import import_module

from mopd_protocol.errors import ConfigError


def import_backend(device: str, *, subject: str) -> None:
    """Import ``torch_npu`` for a device such as ``npu`` or ``npu:1`` (no-op for other devices).

    Args:
        subject: start of the error message: the setting that names the device.

    Raises:
        ConfigError: if ``torch_npu`` is not installed, or does not find its CANN.
    """
    if device.partition(":")[0] != "npu":
        return
    try:
        import_module("torch_npu")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"{subject} needs torch_npu, and that cannot be imported "
            f"({str(error).splitlines()[0]}); install the torch_npu that is made for this torch"
        ) from error
