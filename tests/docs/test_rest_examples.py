"""Every curl line of the documentation, run against a real teacher service."""

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
    """The model of the page's teacher."""
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    return tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("model"))


@pytest.fixture
def address(broker: Broker, model_folder: Path) -> str:
    """The address of the page's teacher."""
    return broker.serve({"math": model_folder})["math"]


@pytest.mark.parametrize("place", range(len(EXAMPLES)))
def test_an_example_is_answered_as_the_page_says(place: int, address: str, tmp_path: Path) -> None:
    text = EXAMPLES[place]
    (expected,) = re.findall(r"^# answers (\d+)$", text, re.M)
    assert "http://127.0.0.1:8101/" in text
    script = _CURL + text.replace("http://127.0.0.1:8101", address)
    told = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "MOPD_TEACHER_KEY": "any"},
        capture_output=True,
        text=True,
    )
    assert told.stdout.rsplit("\n", 1)[-1] == expected, told.stdout + told.stderr


def test_fields_on_the_page_are_those_of_an_answer(address: str, tmp_path: Path) -> None:
    script = EXAMPLES[0].replace("http://127.0.0.1:8101", address)
    told = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "MOPD_TEACHER_KEY": "any"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    page = (PAGES / "rest.md").read_text()
    keys = set(re.findall(r'"(\w+)": ?[\[{]', told.partition('"timings"')[0])) - {"sequences"}
    assert {"token_ids", "byte_ends", "topk_ids", "topk_logprobs", "tail_logprobs"} <= keys
    assert {key for key in keys if f"`{key}`" not in page} == set()
