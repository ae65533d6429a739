"""Environment variables that vLLM reads when it is imported; variables set by the user are kept."""

import logging
import os
from pathlib import Path

from mopd_protocol.runtime.vllm_log_filter import StartupFilter

#: Configuration of vLLM's log, with ``StartupFilter``.
LOGGING_CONFIG = Path(__file__).with_name("vllm_logging.json")
#: Python's tracker of shared memory removes that of a crashed engine and reports a leak, below the
#: reason for the end of the run; PyTorch warns at the import of vLLM in each of its processes.
_IGNORED_WARNINGS = (
    "ignore:resource_tracker:UserWarning",
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
)
#: Loggers of vLLM that log before its log is configured.
_EARLY_LOGGERS = ("vllm.triton_utils.importing",)


def prepare_environment() -> None:
    """Set the defaults; call this before vLLM is imported."""
    verbose = logging.getLogger().isEnabledFor(logging.DEBUG)
    if not verbose and "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(LOGGING_CONFIG))
        for name in _EARLY_LOGGERS:
            logging.getLogger(name).addFilter(StartupFilter())
    own = os.environ.get("PYTHONWARNINGS", "").split(",")
    ignored = [each for each in _IGNORED_WARNINGS if each not in own]
    # The last filter that matches decides, so that the user's own take precedence.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [*ignored, *own]))
    for name, value in {
        # A fork of a process with threads (torch's, a web server's) may hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Stdout is for a program's output; logs, vLLM's too, go to stderr.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
