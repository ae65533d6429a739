"""Client tests run in asyncio, through the pytest plugin of anyio (which httpx brings)."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
