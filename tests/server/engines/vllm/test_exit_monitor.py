"""Tests of the cause of an exit of vLLM's processes."""

import asyncio
import multiprocessing
import os
import signal
import threading
from typing import Any

from mopd_server.engines.vllm.processes.exit_monitor import ExitMonitor, exit_message


def test_exit_code_stored_late_by_another_thread_is_reported() -> None:
    codes = iter([None, None, -signal.SIGKILL])

    class Process:
        name = "EngineCore"
        exitcode = property(lambda self: next(codes))

    process: Any = Process()
    assert exit_message([process]) == "the vLLM process EngineCore was killed by SIGKILL"


def test_exit_is_reported_once_with_its_status_and_not_after_close() -> None:
    context = multiprocessing.get_context("fork")
    causes: list[str] = []
    reported = threading.Event()

    def callback(cause: str) -> None:
        causes.append(cause)
        reported.set()

    process = context.Process(target=os._exit, args=(7,), name="EngineCore")
    monitor, closed = ExitMonitor(), ExitMonitor()
    monitor.add_callback(callback)
    closed.add_callback(causes.append)
    closed.close()
    process.start()
    for each in (monitor, closed):
        each.start([process])
    assert reported.wait(timeout=600)
    assert causes == ["the vLLM process EngineCore exited with status 7; see its log"]
    assert asyncio.run(monitor.cause()) == causes[0]
