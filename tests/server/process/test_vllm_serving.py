"""Test of vLLM teacher processes and a student on one CPU host, and of a pool of vLLM teachers."""

import shutil
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.processes import interpreter, line_with
from tests.server.engines.vllm.test_engine import model_folder
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.whole_runs import journal
from tests.vllm_marks import needs_vllm

pytestmark = needs_vllm

__all__ = ("model_folder",)

#: Longer than a step of 64 tokens.
BODY = {"sequences": [{"prompt": "3 + 4 = 7 " * 9, "completion": " 12 and 7" * 9}], "top_k": 9}

#: How each teacher ends -> its exit status.
ENDS = {"math": (signal.SIGTERM, 0), "code": (signal.SIGKILL, -signal.SIGKILL)}


def test_two_teachers_and_a_student_share_a_host_and_leave_no_process(
    model_folder: Path, tmp_path: Path
) -> None:
    """Without further options: key-value caches are sized from what is free."""
    psutil = pytest.importorskip("psutil", reason="comes with vLLM")
    command = f"serve {model_folder} --engine vllm --port 0 --max-batch-tokens 64"
    command += " --liveness-timeout 11 --name "
    with ExitStack() as stack:
        teachers = {
            name: stack.enter_context(interpreter("mopd_server.main", *command.split(), name))
            for name in ENDS
        }
        assert "per step" in line_with(teachers["math"], "limits: 64 tokens")
        urls = {name: line_with(each, "address").split()[1] for name, each in teachers.items()}
        for name, process in teachers.items():
            line_with(process, f"{name!r} is ready")
        children = {
            name: psutil.Process(process.pid).children(recursive=True)
            for name, process in teachers.items()
        }
        for child in [child for group in children.values() for child in group]:
            stack.callback(lambda child=child: child.is_running() and child.kill())
        _require_trained(model_folder, urls, tmp_path)
        with httpx.Client(base_url=urls["math"], timeout=600) as client:
            expected = _scored(client)
            assert expected[0]["engine"] == "vllm"
            _require_stall_detected(client, children["math"])
        for name, (number, status) in ENDS.items():
            teachers[name].send_signal(number)
            assert teachers[name].wait(timeout=600) == status
            _, alive = psutil.wait_procs(children[name], timeout=600)
            assert not alive
        _require_no_pending_task(teachers["math"].communicate()[0])
    _require_equal_pool(model_folder, tmp_path, expected)


def _require_equal_pool(model: Path, folder: Path, expected: tuple[Any, Any]) -> None:
    """Start a pool with one resident teacher; after a swap, it equals the separate process."""
    other = folder / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * each for name, each in weights.items()}, other / "model.safetensors")
    command = f"serve --models math={model} other={other} --engine vllm --port 0"
    with (
        interpreter("mopd_server.main", *command.split(), "--max-batch-tokens", "64") as process,
        ExitStack() as stack,
    ):
        urls = {name: line_with(process, "address").split()[1] for name in ("math", "other")}
        line_with(process, "'other' is ready")
        clients = {
            name: stack.enter_context(httpx.Client(base_url=url, timeout=600))
            for name, url in urls.items()
        }
        assert _scored(clients["other"])[1] != expected[1]
        assert _scored(clients["math"]) == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 0


def _scored(client: httpx.Client) -> tuple[Any, Any]:
    response = client.post("/v1/logprobs", json=BODY).json()
    return client.get("/v1/manifest").json(), (response["checksum"], response["sequences"])


def _require_trained(model: Path, urls: dict[str, str], folder: Path) -> None:
    """Run ``mopd train`` with vLLM rollouts and both teachers."""
    values = run_values(
        folder,
        max_steps=1,
        teachers={name: {"url": url, "top_k": 8} for name, url in urls.items()},
    )
    values["student"]["model"] = str(model)
    values["rollout"]["engine"] = "vllm"
    write_lines(folder / "prompts.jsonl", prompt_lines(4))
    with interpreter("mopd", "train", str(write_run(folder, values))) as student:
        output, _ = student.communicate(timeout=1500)
    assert student.returncode == 0, output
    (step,) = journal(folder / "run")
    assert all(step[f"teacher/{name}/tokens"] > 0 for name in urls), step
    _require_no_pending_task(output)


def _require_no_pending_task(output: str) -> None:
    assert "Task was destroyed" not in output, output


def _require_stall_detected(client: httpx.Client, children: list[Any]) -> None:
    """Stop the engine's process, and let it continue: neither ready nor alive, then both."""
    (engine,) = (child for child in children if "EngineCore" in child.name())
    for number, status in ((signal.SIGSTOP, 503), (signal.SIGCONT, 200)):
        engine.send_signal(number)
        for path in ("/readyz", "/healthz"):
            while (response := client.get(path)).status_code != status:
                threading.Event().wait(0.05)  # poll: the other process cannot notify this one
            assert status == 200 or response.json()["code"] == "stalled"
