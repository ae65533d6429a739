"""``device_of``: the device of a student."""

import torch

from mopd_protocol.errors import ConfigError
from mopd_protocol.runtime.npu import import_backend


def device_of(name: str) -> torch.device:
    """Return the device of a name; ``auto``: the first accelerator, or the CPU.

    Raises:
        ConfigError: when the device is not available.
    """
    if name != "auto":
        import_backend(name, subject=f"student.device is {name!r}, which")
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"student.device: not available (found {name!r}): {reason}", key="student.device"
            ) from error
    available = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if available else None
    return accelerator or torch.device("cpu")
