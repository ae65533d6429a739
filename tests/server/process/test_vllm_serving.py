"""Test of a teacher process with vLLM, from its start to the exit of all its processes."""

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import interpreter, line_with
from tests.server.engines.vllm.test_engine import model_folder
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm

__all__ = ("model_folder",)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_vllm_teacher_serves_and_exits_with_all_its_processes(
    number: signal.Signals, model_folder: Path
) -> None:
    psutil = pytest.importorskip("psutil", reason="comes with vLLM")
    command = f"serve {model_folder} --engine vllm --name math --port 0 --max-batch-tokens 64 "
    command += "--liveness-timeout 11"
    with ExitStack() as stack:
        # Without VLLM_CPU_KVCACHE_SPACE: the cache is sized from what is free.
        process = stack.enter_context(interpreter("mopd_server.main", *command.split()))
        assert "per step" in line_with(process, "limits: 64 tokens")
        address = line_with(process, "address").split()[1]
        line_with(process, "'math' is ready")
        with httpx.Client(base_url=address, timeout=600) as client:
            body = {"sequences": [{"prompt": "the quick", "completion": " fox"}], "top_k": 3}
            response = client.post("/v1/logprobs", json=body)
            assert response.status_code == 200, response.text
            assert client.get("/v1/manifest").json()["engine"] == "vllm"
            children = psutil.Process(process.pid).children(recursive=True)
            stack.callback(lambda: [child.kill() for child in children if child.is_running()])
            if number == signal.SIGTERM:
                _require_stall_detected(client, children)
        process.send_signal(number)
        assert process.wait(timeout=600) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=600)
        assert not alive


def _require_stall_detected(client: httpx.Client, children: list[Any]) -> None:
    """Stop the engine's process, and let it continue: neither ready nor alive, then both."""
    (engine,) = (child for child in children if "EngineCore" in child.name())
    for number, status in ((signal.SIGSTOP, 503), (signal.SIGCONT, 200)):
        engine.send_signal(number)
        for path in ("/readyz", "/healthz"):
            while (response := client.get(path)).status_code != status:
                threading.Event().wait(0.05)  # poll: the other process cannot notify this one
            assert status == 200 or response.json()["code"] == "stalled"
