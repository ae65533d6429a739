"""Every curl line of the documentation, run against a real teacher service."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import tiny_models
from tests.broker import Broker
from tests.docs.pages import PAGES, examples

EXAMPLES = [text for _, text in examples("sh", "rest.md") if "curl" in text]
#: In place of curl: the same, and the status as the last line.
_CURL = "curl() { command curl --silent --write-out '\\n%{http_code}' \"$@\"; }\n"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    return tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture
def address(broker: Broker, model_folder: Path) -> str:
    """Return the address of a teacher."""
    return broker.serve({"math": model_folder})["math"]


@pytest.mark.parametrize("place", range(len(EXAMPLES)))
def test_an_example_returns_the_documented_status(place: int, address: str, tmp_path: Path) -> None:
    text = EXAMPLES[place]
    (expected,) = re.findall(r"^# status: (\d+)$", text, re.M)
    assert "http://127.0.0.1:8101/" in text
    script = _CURL + text.replace("http://127.0.0.1:8101", address)
    completed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "MOPD_TEACHER_KEY": "any"},
        capture_output=True,
        text=True,
    )
    assert completed.stdout.rsplit("\n", 1)[-1] == expected, completed.stdout + completed.stderr


def test_fields_of_a_response_are_documented(address: str, tmp_path: Path) -> None:
    script = EXAMPLES[0].replace("http://127.0.0.1:8101", address)
    completed = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "MOPD_TEACHER_KEY": "any"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (PAGES / "rest.md").read_text()
    keys = json.loads(completed)["sequences"][0].keys()
    assert {"token_ids", "byte_ends", "topk_ids", "topk_logprobs", "tail_logprobs"} <= keys
    assert {key for key in keys if f"`{key}`" not in page} == set()
