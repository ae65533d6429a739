"""Mark for tests that start vLLM; they are skipped if vLLM is not installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

#: Result of the installation, written by ``make vllm``.
OUTCOME = Path(sys.prefix) / ".vllm"


def _skip_reason() -> str:
    outcome = OUTCOME.read_text().strip() if OUTCOME.is_file() else ""
    return outcome or "vLLM is not installed; make vllm installs it"


#: For ``pytestmark``. vLLM starts in 20 s, on a busy machine in minutes.
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason=_skip_reason()),
]
