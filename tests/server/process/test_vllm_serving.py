"""Test of a teacher process with vLLM, from its start to the exit of all its processes."""

import signal
from contextlib import ExitStack
from pathlib import Path

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
    command = f"serve {model_folder} --engine vllm --name math --port 0 --max-batch-tokens 64"
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
        assert any("EngineCore" in child.name() for child in children)
        process.send_signal(number)
        assert process.wait(timeout=600) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=600)
        assert not alive
