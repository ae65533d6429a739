"""``mopd-teacher deploy`` with real Ray Serve: two teachers, one of them with two replicas."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from mopd_client.teacher_client import TeacherClient
from mopd_protocol.codec import BINARY_MEDIA_TYPE
from mopd_protocol.requests import REQUEST_HEADER, LogprobsRequest, SequenceRequest, body_hash
from mopd_protocol.samples import TeacherScore
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.ports import free_port
from tests.processes import line_with
from tests.server.tiny_teachers import FAMILIES, problem
from tests.trainer.launch.test_cluster import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.anyio]

PROGRAM = Path(sys.executable).parent / "mopd-teacher"
REPLICAS = 2
KEY = "secret"
MAX_BODY = 8 * 2**20
#: In flight while a replica is killed: the longer a request takes, the more are on that replica.
REQUESTS, SEQUENCES, IN_FLIGHT = 48, 24, 16


@dataclass(frozen=True)
class Deployment:
    """A running ``mopd-teacher deploy``."""

    process: "subprocess.Popen[str]"
    file: Path
    address: str
    models: dict[str, Path]

    def client(self, name: str) -> TeacherClient:
        return TeacherClient(
            name, [f"{self.address}/{name}"], api_key=KEY, max_concurrency=IN_FLIGHT, verify=0
        )

    def replicas(self, name: str) -> list[int]:
        """PIDs of a teacher's replicas."""
        return processes(self.file, f"ServeReplica:{name}")


def deploy(file: Path) -> "subprocess.Popen[str]":
    """Start the command, with its log next to the file."""
    return subprocess.Popen(
        [PROGRAM, "deploy", file, "--address", "local"],
        stdout=subprocess.PIPE,
        stderr=file.with_suffix(".log").open("w"),
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MOPD_TEST_RUN": str(file)},
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for name, family in (("math", "llama"), ("code", "gpt_neox")):
        make_model, make_tokenizer = FAMILIES[family]
        tokenizer = make_tokenizer()
        folders[name] = tiny_models.save(
            make_model(tokenizer), tokenizer, tmp_path_factory.mktemp(name)
        )
    return folders


@pytest.fixture(scope="module")
def deployment(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder, port = tmp_path_factory.mktemp("deployment"), free_port()
    (folder / "keys").write_text(f"alice {KEY}\n")
    teachers = [
        {"name": name, "model": str(path), "num_cpus": 0.1} for name, path in models.items()
    ]
    teachers[0] |= {"replicas": REPLICAS}
    teachers[1] |= {"max_queue_tokens": 1}  # one request in the engine, and one in the queue
    file = folder / "teachers.yaml"
    values = {"port": port, "api_key_file": str(folder / "keys"), "teachers": teachers}
    file.write_text(yaml.safe_dump({**values, "max_body_bytes": MAX_BODY}))
    process = deploy(file)
    try:
        try:
            line_with(process, "all teachers are ready")
        except AssertionError:
            pytest.fail(file.with_suffix(".log").read_text())
        yield Deployment(process, file, f"http://127.0.0.1:{port}", models)
        process.terminate()
        assert process.wait(timeout=300) == 0, file.with_suffix(".log").read_text()
        assert not processes(file, "ServeReplica")
    finally:
        process.kill()


def request(number: int) -> list[SequenceRequest]:
    random = np.random.default_rng(number)
    ids = random.integers(8, 400, (SEQUENCES, 100)).tolist()
    return [
        SequenceRequest(prompt_token_ids=row[:40], completion_token_ids=row[40:]) for row in ids
    ]


async def assert_exact(
    model: Path, requests: list[list[SequenceRequest]], scores: list[list[TeacherScore]]
) -> None:
    """Compare scores with those of the model in this process."""
    service = await asyncio.to_thread(TeacherService.load, TeacherSettings(model=str(model)))
    await asyncio.to_thread(service.warm_up)
    for sequences, actual in zip(requests, scores, strict=True):
        expected = await service.score(LogprobsRequest(sequences=sequences, top_k=8))
        for score, reference in zip(actual, expected.scores, strict=True):
            np.testing.assert_allclose(score.topk.logprobs, reference.topk.logprobs, atol=1e-4)
    service.close()


async def test_no_score_is_lost_or_wrong_when_a_replica_is_killed(deployment: Deployment) -> None:
    requests = [request(number) for number in range(REQUESTS)]
    done = 0
    async with deployment.client("math") as client, deployment.client("code") as other:
        await asyncio.gather(client.handshake(), other.handshake())

        async def score(sequences: list[SequenceRequest]) -> list[TeacherScore]:
            nonlocal done
            scores = await client.score(sequences, top_k=8)
            done += 1
            if done == IN_FLIGHT:
                os.kill(deployment.replicas("math")[0], signal.SIGKILL)
            return scores

        scores, others = await asyncio.gather(
            asyncio.gather(*map(score, requests)), other.score(requests[0], top_k=8)
        )
        assert client.counters.retries > 0
    await assert_exact(deployment.models["math"], requests, scores)
    await assert_exact(deployment.models["code"], requests[:1], [others])
    until(lambda: len(deployment.replicas("math")) == REPLICAS, None)


def post(deployment: Deployment, body: bytes, *, name: str = "math", **headers: str) -> Any:
    """Send a scoring request."""
    all_headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    all_headers |= {header.replace("_", "-"): value for header, value in headers.items()}
    address = f"{deployment.address}/{name}/v1/logprobs"
    return httpx.post(address, content=body, headers=all_headers, timeout=300)


def test_errors_and_request_ids_come_through_the_proxy_unchanged(deployment: Deployment) -> None:
    problem(post(deployment, b"{"), 400, "malformed")
    problem(post(deployment, b"{}", authorization="Bearer x"), 401, "unauthorized")
    problem(post(deployment, b" " * (MAX_BODY + 1)), 413, "too_large")
    missing = httpx.get(f"{deployment.address}/math/nothing")
    assert problem(missing, 404, "not_found")["instance"] == missing.headers["x-request-id"]
    named = post(deployment, b"{", x_request_id="mine")
    assert named.headers.get_list("x-request-id") == ["mine"]
    assert httpx.get(f"{deployment.address}/code/readyz").json() == {"status": "ready"}


def test_a_full_queue_is_a_429_with_retry_after(deployment: Deployment) -> None:
    body = LogprobsRequest(sequences=request(0), top_k=8).model_dump_json(exclude_none=True)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        responses = list(
            threads.map(
                lambda _: post(deployment, body.encode(), name="code"), range(2 * IN_FLIGHT)
            )
        )
    rejected = [response for response in responses if response.status_code != 200]
    assert 0 < len(rejected) < len(responses)
    for response in rejected:
        problem(response, 429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1


def test_a_large_body_and_a_large_response_come_through_the_proxy(deployment: Deployment) -> None:
    sequence = json.dumps({"prompt_token_ids": [1], "completion_token_ids": [3] * 250})
    sequences = f",{' ' * 50_000}".join([sequence] * 100)
    body = f'{{"top_k": 400, "sequences": [{sequences}]}}'.encode()
    response = post(deployment, body, accept=BINARY_MEDIA_TYPE)
    assert response.status_code == 200, response.text
    assert response.headers[REQUEST_HEADER] == body_hash(body)
    assert len(response.content) > 100 * 250 * 400 * 8


def test_a_teacher_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "teachers.yaml"
    teachers = [{"name": "math", "model": str(tmp_path), "num_cpus": 0.1}]
    file.write_text(yaml.safe_dump({"port": free_port(), "teachers": teachers}))
    process = deploy(file)
    try:
        process.communicate(timeout=800)
    finally:
        process.kill()
    assert process.returncode == 1
    last = file.with_suffix(".log").read_text().strip().splitlines()[-1]
    assert last.startswith("mopd-teacher: teacher 'math': ")
    assert "ConfigError" in last
