"""What all recipes run on: tiny models, their services, and one thread."""

from collections.abc import Iterator

import pytest

from mopd.demo.services import teacher_services
from mopd_client.tokenizers.folder import read_folder_tokenizer
from tests import tiny_models
from tests.client.scripted_vllm import ScriptedVllm
from tests.cookbook.stock_server import listening
from tests.trainer.conftest import one_thread
from tests.trainer.students import model_of, tokenizer

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Models and services for all recipes: a student, two strangers to it, one of its family."""
    made = {"student": ("qwen", "digit"), "family": ("qwen", "digit")}
    made |= {"math": ("llama", "sentencepiece"), "general": ("gpt_neox", "whole_number")}
    folders = {
        name: tiny_models.save(
            model_of(model, sharpness=4.0), tokenizer(own), tmp_path_factory.mktemp(name)
        )
        for name, (model, own) in made.items()
    }
    served = read_folder_tokenizer(str(folders["general"]))
    # The recipe's own K, which the server has to have been started with.
    stock = ScriptedVllm(served.tokenizer, width=served.table.size, max_logprobs=64)
    teachers = {name: folders[name] for name in ("family", "math", "general")}
    with (
        teacher_services(teachers, tmp_path_factory.mktemp("logs")) as addresses,
        listening(stock) as stock_address,
    ):
        yield {
            "student": str(folders["student"]),
            "tokenizer": str(folders["general"]),
            "stock": stock_address,
            **addresses,
        }
