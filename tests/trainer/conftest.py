"""Trainer tests run in asyncio, and on one thread, so that sums are always rounded the same."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What ``OMP_NUM_THREADS=1`` is to a subprocess."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
