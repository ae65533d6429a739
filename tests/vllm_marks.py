"""The mark of tests that start vLLM, and why they are skipped where it is not installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

#: Written by ``make vllm``: what became of the installation.
OUTCOME = Path(sys.prefix) / ".vllm"


def _why_not() -> str:
    told = OUTCOME.read_text().strip() if OUTCOME.is_file() else ""
    return told or "vLLM is not installed here; make vllm installs it"


#: For ``pytestmark``. vLLM starts in 20 s, and in minutes where other work fills the processors.
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason=_why_not()),
]
