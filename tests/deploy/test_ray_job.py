"""The Ray job of the manifests: its command, submitted to a head and a worker on this machine."""

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny_models
from tests.broker import Broker
from tests.deploy.compose_files import DEPLOY, ray_groups, ray_job
from tests.ports import free_port
from tests.trainer.launch.test_cluster import until
from tests.trainer.runs import prompt_lines, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import journal

pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]

BIN = Path(sys.executable).parent
AGENT_PORT = ":52365/"  # the default of a node


@dataclass(frozen=True)
class Cluster:
    """Two nodes, what their processes have in their environment, and where each is probed."""

    dashboard: str
    environment: dict[str, str]
    agents: list[int]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without devices and a worker with all of them, as the manifests have it, and with the
    token that the operator would make for them."""
    port, dashboard, agents = free_port(), free_port(), [free_port(), free_port()]
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": ray_job()["spec"]["rayClusterSpec"]["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "MOPD_TEACHER_KEY": "unused",
    }
    with ExitStack() as stack:
        # Sockets lie in it, whose names must be short.
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        own = [
            ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"],
            [f"--address=127.0.0.1:{port}", "--num-cpus=4"],
        ]
        for number, group in enumerate(ray_groups()):
            options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
            agent = f"--dashboard-agent-listen-port={agents[number]}"
            # The output is captured with that of the tests and shown after a failure.
            command = [BIN / "ray", "start", *own[number], *options, agent, "--block"]
            node = subprocess.Popen(command, text=True, env=environment)
            stack.callback(node.wait)
            stack.callback(node.terminate)
            until(partial(_healthy, group, agents[number]), node)
        yield Cluster(f"http://127.0.0.1:{dashboard}", environment, agents)


def _healthy(group: dict[str, Any], port: int) -> bool:
    (container,) = group["template"]["spec"]["containers"]
    python, *arguments = container["readinessProbe"]["exec"]["command"]
    assert python == "python3"
    assert AGENT_PORT in arguments[-1]
    local = [argument.replace(AGENT_PORT, f":{port}/") for argument in arguments]
    return not subprocess.run([sys.executable, *local], capture_output=True).returncode


@pytest.fixture(scope="module")
def run_file(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests' run with tiny models in place, on CPUs, and short."""
    tmp_path = tmp_path_factory.mktemp("job")
    values = yaml.safe_load((DEPLOY / "kubernetes" / "ray" / "run.yaml").read_text())
    assert values["student"]["sharding"] == "fsdp"
    values |= {"output_dir": str(tmp_path / "run"), "max_steps": 2, "save_steps": 1}
    values["resources"]["device"] = values["student"]["device"] = "cpu"
    values["data"]["prompts"] = str(tmp_path / "prompts.jsonl")
    values["student"]["model"] = str(tmp_path / "student")
    values["rollout"] |= {"prompts_per_step": 4, "max_new_tokens": 8}
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(4, ["math", "general"]))
    for name, seed in (("student", 0), ("math", 1), ("general", 2)):
        tiny_models.save(model_of("qwen", seed, sharpness=4), tokenizer("digit"), tmp_path / name)
    folders = {name: tmp_path / name for name in values["teachers"]}
    for name, address in broker.serve(folders).items():
        values["teachers"][name] |= {"url": address, "top_k": 8}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def submitted(cluster: Cluster, run_file: Path) -> subprocess.CompletedProcess[str]:
    """The entry point, as the operator submits it."""
    program, command, path = shlex.split(ray_job()["spec"]["entrypoint"])
    assert (program, command, path) == ("mopd", "train", "/etc/mopd/run.yaml")
    entry = [program, command, str(run_file)]
    return subprocess.run(
        [BIN / "ray", "job", "submit", "--address", cluster.dashboard, "--", *entry],
        capture_output=True,
        text=True,
        env=cluster.environment,
    )


def test_the_job_trains_two_ranks_on_the_worker(cluster: Cluster, run_file: Path) -> None:
    ended = submitted(cluster, run_file)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folder = run_file.parent / "run"
    assert [line["step"] for line in journal(folder)] == [1, 2]
    assert (folder / "final" / "model.safetensors").exists()


def test_a_run_without_the_clusters_token_is_refused_in_a_sentence(
    cluster: Cluster, run_file: Path
) -> None:
    wrong = {**cluster.environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = subprocess.run(
        [BIN / "mopd", "train", run_file], capture_output=True, text=True, env=wrong
    )
    assert refused.returncode == 2
    assert refused.stderr.count("mopd: ") == 1
    assert "RAY_AUTH_MODE=token" in refused.stderr
    assert "Traceback" not in refused.stderr
