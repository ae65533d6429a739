"""Tests of the cause of an exit, from the standard error of a process."""

import os
import subprocess

import pytest

from mopd_server.engines.vllm.processes.stderr_tail import StderrTail

PREFIX = "(EngineCore pid=7) ERROR 11-22 18:00:00 [core.py:1510]"
LOG = f"""\
{PREFIX} EngineCore failed to start.
{PREFIX} Traceback (most recent call last):
{PREFIX}   File "core.py", line 1, in run
{PREFIX} ValueError: the cache has no room for 4096 tokens [64 blocks]
Traceback (most recent call last):
  File "utils.py", line 2, in wait
RuntimeError: Engine core initialization failed. Failed core proc(s): {{}}
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LOG, "ValueError: the cache has no room for 4096 tokens [64 blocks]"),
        ("WARNING [a.py:1] RuntimeError: retried\n", None),
    ],
)
def test_first_error_of_a_process_is_remembered_and_passed_on(
    text: str, error: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    tail = StderrTail()
    with tail.inherited():
        subprocess.run(["sh", "-c", 'printf "%s" "$TEXT" >&2'], env={**os.environ, "TEXT": text})
    assert tail.first_error(wait_seconds=300) == error
    assert capfd.readouterr().err == text
