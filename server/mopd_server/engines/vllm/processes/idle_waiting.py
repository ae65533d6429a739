"""Wait for messages between vLLM's processes without spinning.

vLLM's processes poll their queue in a loop while they wait, and for a second after each message. On
a CPU, the loop takes the cores that compute.
"""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from inspect import signature
from typing import Any

#: Between two looks at the queue, if a notification were lost.
_LONGEST_MILLISECONDS = 100


def wait_without_spinning() -> bool:
    """Patch vLLM in this process; return False, without effect, if its internals have changed."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return False
    wait = getattr(SpinCondition, "wait", None)
    if wait is None or [*signature(wait).parameters] != ["self", "timeout_ms"]:
        return False

    def wait_for_notification(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0.0
        longest = _LONGEST_MILLISECONDS
        wait(self, longest if timeout_ms is None else min(timeout_ms, longest))

    SpinCondition.wait = wait_for_notification
    return True
