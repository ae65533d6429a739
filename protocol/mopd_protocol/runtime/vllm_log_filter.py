"""``StartupFilter``: vLLM's warnings about settings that mopd has chosen, or that need no action.

vLLM's processes import the filter by ``vllm_logging.json``.
"""

import logging

#: Starts of messages. Errors are never filtered.
_KNOWN = (
    # mopd sets these: token ids in, token ids out; no compilation on a CPU; its own scheduler.
    "Enforce eager set",
    "Inductor compilation was disabled by user settings",
    "Using None for EOS token id because tokenizer is not initialized",
    "Using custom scheduler class mopd_server.",
    # A CPU has no Triton kernels.
    "Model Runner V2 requires Triton",
    "Reset SSM cache type to float32",
    "Triton is installed, but doesn't include CPU backend",
    "Triton is installed but 0 active driver(s) found",
    "Triton is not installed",
    "Triton not installed",
)


class StartupFilter(logging.Filter):
    """Reject known warnings; everything else passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        return record.levelno >= logging.ERROR or not record.getMessage().startswith(_KNOWN)
