"""One small model for all tests here, whose subject is the process around it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of up to 1024 positions."""
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    model.config.max_position_embeddings = 1024
    return tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("models") / "secret-qwen")


@pytest.fixture(scope="session")
def full_size() -> bool:
    """True for the long form: ``make survival``."""
    return os.environ.get("MOPD_SURVIVAL") == "full"


@pytest.fixture(autouse=True)
def quiet_requests() -> Iterator[None]:
    """Silence httpx, which logs a line for each of thousands of requests."""
    logger = logging.getLogger("httpx")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)
