"""Environment variables that vLLM reads when it is imported; variables set by the user are kept."""

import logging
import os


def prepare_environment() -> None:
    """Set the defaults; call this before vLLM is imported."""
    verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
    for name, value in {
        # A fork of a process with threads (torch's, a web server's) may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Stdout is for a program's output; logs, vLLM's too, go to stderr.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
