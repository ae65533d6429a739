"""Environments with the packages of other trainers, and a teacher whose distributions are known."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny_models
from tests.broker import Broker

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
#: One environment per trainer, made by ``make doors``.
ENVIRONMENTS = Path(os.environ.get("MOPD_DOORS", ROOT / ".doors"))
TOP_K = 8
#: Largest difference of a log-probability from the model's own.
ROUNDING = 1e-5
#: Log-probability of an impossible token, as in vLLM's responses.
FLOOR = -9999.0


@dataclass(frozen=True)
class Teacher:
    """A model that a service can serve, and sequences to score."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    sequences: list[list[int]]
    prompt_lengths: list[int]

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """Return [tokens - 1, width]: row ``r`` predicts token ``r + 1``, in nats.

        A row of the head without a token has the floor of the wire.
        """
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].double() / temperature
        logits[:, len(self.tokenizer) :] = -torch.inf
        return logits.log_softmax(-1).clamp(min=FLOOR)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    """Return a teacher with a padded head, and sequences that trainers send.

    Several turns, ending tokens inside and at the end, ids of the padded head, a prompt of one
    token, and a completion of one.
    """
    tokenizer = tiny_models.digit_tokenizer()
    model = tiny_models.qwen(tokenizer)
    padded, end = len(tokenizer), int(tokenizer.eos_token_id)
    assert padded < model.config.vocab_size - 1
    turns = [("user", "12 + 30 ="), ("assistant", "42"), ("user", "and 7?"), ("assistant", "49")]
    messages = [{"role": role, "content": content} for role, content in turns]
    [several] = [tokenizer.apply_chat_template(messages, tokenize=False)]
    ids = tokenizer.encode(several, add_special_tokens=False)
    assert ids.count(end) == 2
    text = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    sequences = [
        ids,
        [*text, padded, *text, end, end, padded + 1, end],
        [end, *text, end],
        [*text, end],
    ]
    folder = tmp_path_factory.mktemp("doors") / "teacher"
    tiny_models.save(model, tokenizer, folder)
    return Teacher(folder, model, tokenizer, sequences, [10, len(text), 1, len(text)])


@pytest.fixture
def url(broker: Broker, teacher: Teacher) -> str:
    """Return the address of a service of the teacher."""
    return broker.serve({"math": teacher.folder})["math"]


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory, teacher: Teacher) -> Path:
    """Return the folder of a student of the same vocabulary."""
    folder = tmp_path_factory.mktemp("doors") / "student"
    return tiny_models.save(tiny_models.qwen(teacher.tokenizer, seed=1), teacher.tokenizer, folder)


def run_python(
    environment: str | Path, arguments: list[object], folder: Path, **variables: str
) -> str:
    """Run a Python of one of ``ENVIRONMENTS`` in a folder, and return its output."""
    python = ENVIRONMENTS / environment / "bin" / "python"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    completed = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=folder,
        env=own | variables,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.fixture
def run_script(tmp_path: Path, url: str, teacher: Teacher) -> Callable[..., Any]:
    """Return a function that runs a script of an environment, and returns its result."""

    def run(environment: str, script: str, /, **job: Any) -> Any:
        common = {
            "url": url,
            "top_k": TOP_K,
            "temperature": 1.0,
            "sequences": teacher.sequences,
            "prompt_lengths": teacher.prompt_lengths,
        }
        (tmp_path / "job.json").write_text(json.dumps(common | job))
        run_python(
            environment,
            [SCRIPTS / script, "job.json", "result.json"],
            tmp_path,
            VERL_USE_EXTERNAL_MODULES="mopd.integrations.verl",
        )
        return json.loads((tmp_path / "result.json").read_text())

    return run
