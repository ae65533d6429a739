"""Tiny models and their services for all recipes, on one thread."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd_client.tokenizers.pretrained import load_tokenizer
from tests import tiny_models
from tests.broker import Broker
from tests.client.scripted_vllm import ScriptedVllm
from tests.cookbook.stock_server import listening
from tests.trainer.conftest import one_thread
from tests.trainer.students import model_of, tokenizer

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def recipe_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, a teacher of its family and two of other families."""
    families = {"student": ("qwen", "digit"), "family": ("qwen", "digit")}
    families |= {"math": ("llama", "sentencepiece"), "general": ("gpt_neox", "whole_number")}
    return {
        name: tiny_models.save(
            model_of(model, sharpness=4.0), tokenizer(own), tmp_path_factory.mktemp(name)
        )
        for name, (model, own) in families.items()
    }


@pytest.fixture(scope="session")
def stock_address(recipe_models: dict[str, Path]) -> Iterator[str]:
    """A stock vLLM server with the tokenizer of ``general``."""
    served = load_tokenizer(str(recipe_models["general"]))
    # The recipe's own K, with which the server has to be started.
    with listening(ScriptedVllm(served.tokenizer, width=served.table.size, max_logprobs=64)) as url:
        yield url


@pytest.fixture
def stand_ins(broker: Broker, recipe_models: dict[str, Path], stock_address: str) -> dict[str, str]:
    """Models and service addresses to fill in for those of the recipes."""
    teachers = {name: recipe_models[name] for name in ("family", "math", "general")}
    return {
        "student": str(recipe_models["student"]),
        "tokenizer": str(recipe_models["general"]),
        "stock": stock_address,
        **broker.serve(teachers),
    }
