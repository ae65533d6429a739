"""Trainer tests run in asyncio, and on one thread, so that sums are always rounded the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import tiny_models
from tests.broker import Broker
from tests.trainer.students import model_of, tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student and two teachers, of three families."""
    families = {"student": ("qwen", "digit"), "math": ("llama", "sentencepiece")}
    families["code"] = ("gpt_neox", "whole_number")
    return {
        name: tiny_models.save(model_of(family), tokenizer(own), tmp_path_factory.mktemp(name))
        for name, (family, own) in families.items()
    }


@pytest.fixture
def addresses(broker: Broker, models: dict[str, Path]) -> dict[str, str]:
    """Teacher name -> address of its service."""
    return broker.serve({name: models[name] for name in ("math", "code")})
