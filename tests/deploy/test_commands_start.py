"""The commands of the deployment files, started unchanged, with their health checks."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from mopd_server.main import parser, settings_of
from tests import tiny_models
from tests.deploy.chart import objects
from tests.deploy.compose_files import DEPLOY, TEACHER_FILES, teacher_commands, teachers
from tests.deploy.dashboard import queries, selectors, series, unmatched
from tests.deploy.running_commands import StartedCommand, start
from tests.ports import free_port

pytestmark = pytest.mark.process

#: One of each file: the other differs only in its model and name (test_shipped_files.py).
COMMANDS = [
    "compose.yaml teacher-math",
    "compose.cpu.yaml teacher-sums",
    "compose.npu.yaml teacher-general",
    "kubernetes teacher-general",
    "systemd math",
]
KEYS = DEPLOY / "secrets" / "api_keys.example"
SEQUENCE = {"messages": [{"role": "user", "content": "3 + 4 ="}], "completion": "7"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StartedCommand]]:
    """Every command's teacher, ready."""
    tokenizer = tiny_models.sentencepiece_tokenizer()
    model = tiny_models.llama(tokenizer)
    model.config.max_position_embeddings = 8192  # as the files set it
    folder = tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("model"))
    chosen = {where: teacher_commands()[where] for where in COMMANDS}
    with ExitStack() as stack:
        commands = start(stack, chosen, folder, KEYS, tmp_path_factory.mktemp("logs"))
        for command in commands.values():
            command.teacher.until("/readyz", 200)
        yield commands


def _key() -> str:
    (line,) = (line for line in KEYS.read_text().splitlines() if not line.startswith("#"))
    return line.split()[1]


def _score(teacher: StartedCommand, **headers: str) -> httpx.Response:
    body = {"sequences": [SEQUENCE], "top_k": 8}
    return httpx.post(teacher.teacher.url + "/v1/logprobs", json=body, headers=headers, timeout=600)


def _healthy(test: list[str], port: int) -> bool:
    kind, _, *arguments = test
    assert kind == "CMD"
    local = [argument.replace(":8101/", f":{port}/") for argument in arguments]
    return not subprocess.run([sys.executable, *local], capture_output=True).returncode


@pytest.mark.parametrize("where", COMMANDS)
def test_a_shipped_command_serves_requests_with_a_key(
    started: dict[str, StartedCommand], where: str
) -> None:
    assert _score(started[where]).status_code == 401
    response = _score(started[where], Authorization=f"Bearer {_key()}")
    assert response.status_code == 200, response.text
    manifest = httpx.get(
        started[where].teacher.url + "/v1/manifest",
        headers={"Authorization": f"Bearer {_key()}"},
        timeout=600,
    ).json()
    settings, _ = settings_of(parser().parse_args(teacher_commands()[where]))
    assert manifest["service"] == settings.service_name
    assert manifest["max_top_k"] == min(settings.top_k_max, manifest["tokenizer_size"])


@pytest.mark.parametrize("file", TEACHER_FILES)
def test_a_health_check_fails_without_a_ready_teacher(
    started: dict[str, StartedCommand], file: str
) -> None:
    (where,) = (where for where in COMMANDS if where.startswith(f"{file} "))
    test = teachers(file)[where.split()[1]]["healthcheck"]["test"]
    assert _healthy(test, started[where].port)
    assert not _healthy(test, free_port())


def test_dashboard_and_alerts_query_exported_metrics(
    started: dict[str, StartedCommand],
) -> None:
    teacher = started["compose.yaml teacher-math"]
    assert _score(teacher, Authorization=f"Bearer {_key()}").status_code == 200
    assert _score(teacher).status_code == 401  # so that refusals have a series
    exported = series(teacher.teacher.get("/metrics").text)
    queried = queries(DEPLOY / "grafana" / "dashboards" / "teachers.json")
    queried += queries(DEPLOY / "prometheus" / "alerts.yml")
    assert len(queried) > 15
    assert sum(len(selectors(query)) for query in queried) >= len(queried)
    chart = objects({"defaults": {"autoscaling": {"enabled": True}}})
    for scaler in (each for each in chart if each["kind"] == "HorizontalPodAutoscaler"):
        queried += [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert {query: missing for query in queried if (missing := unmatched(query, exported))} == {}


def test_a_metric_that_no_teacher_has_is_found(started: dict[str, StartedCommand]) -> None:
    exported = series(started["compose.yaml teacher-math"].teacher.get("/metrics").text)
    assert unmatched("rate(mopd_tokens_scored_total[5m])", exported) == []
    assert unmatched("rate(mopd_tokens_scored[5m])", exported) == ["mopd_tokens_scored"]
    assert unmatched('sum by (phase) (mopd_queue_tokens{phase="queue"})', exported) == [
        "mopd_queue_tokens"
    ]
