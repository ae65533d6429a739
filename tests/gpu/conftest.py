"""The device under test: the first CUDA device, or the one that ``MOPD_TEST_DEVICE`` names.

``MOPD_TEST_DEVICE=cpu`` checks the tests themselves, at small sizes: `make test-all` does.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device, with its number."""
    name = os.environ.get("MOPD_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device found")
    return torch.empty(0, device=name).device


@pytest.fixture(scope="session")
def full_size(device: torch.device) -> bool:
    """True where the sizes are those of a training run."""
    return device.type == "cuda"
