"""Environment variables that vLLM reads when it is imported; what the user has set stays."""

import logging
import os


def prepare_environment() -> None:
    """To be called before anything imports vLLM."""
    verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
    for name, value in {
        # A fork of a process with threads (torch's, a web server's) may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # What a program prints about itself goes to stdout; logs, vLLM's too, go to stderr.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
