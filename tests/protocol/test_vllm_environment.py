"""vLLM's log has warnings and errors, without those that mopd causes."""

import json
import logging
import logging.config
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mopd_protocol.runtime.vllm_environment import LOGGING_CONFIG, prepare_environment


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    logger = logging.getLogger("vllm")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_known_warnings_are_not_shown_and_all_others_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.config.dictConfig(json.loads(LOGGING_CONFIG.read_text()))
    logger = logging.getLogger("vllm.config.vllm")
    logger.info("Using max model len 256")
    logger.warning("Enforce eager set, disabling torch.compile, CUDAGraphs")
    logger.warning("Using custom scheduler class %s.", "mopd_server.engines.vllm.prefix_cache")
    assert capsys.readouterr().err == ""
    logger.warning("Using custom scheduler class %s.", "another.Scheduler")
    logger.warning("The cache is too small")
    logger.error("Triton is not installed")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[2] for line in lines] == [
        "Using custom scheduler class another.Scheduler.",
        "The cache is too small",
        "Triton is not installed",
    ]


@pytest.mark.process
def test_shared_memory_of_a_crashed_engine_is_not_reported() -> None:
    program = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from mopd_protocol.runtime.vllm_environment import prepare_environment\n"
        "prepare_environment()\n"
        "SharedMemory(create=True, size=8)\n"
        "raise SystemExit('the reason')"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert ended.stderr == "the reason\n"


def test_the_configuration_is_that_of_the_user_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    prepare_environment()
    prepare_environment()
    assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == str(LOGGING_CONFIG)
    assert os.environ["PYTHONWARNINGS"].endswith(",error::UserWarning")
    assert os.environ["PYTHONWARNINGS"].count("ignore:") == 2
    for name, value in (("LEVEL", "DEBUG"), ("CONFIG_PATH", "own.json")):
        with monkeypatch.context() as patched:
            patched.delenv("VLLM_LOGGING_CONFIG_PATH")
            patched.delenv("VLLM_LOGGING_LEVEL")
            patched.setenv(f"VLLM_LOGGING_{name}", value)
            prepare_environment()
            assert os.environ.get("VLLM_LOGGING_CONFIG_PATH") == (
                "own.json" if name == "CONFIG_PATH" else None
            )
