"""The commands of the deployment files, started as they stand, with their own health checks."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from mopd_server.main import parser, settings_of
from tests import tiny_models
from tests.deploy.compose_files import DEPLOY, TEACHER_FILES, teacher_commands, teachers
from tests.deploy.dashboard import queries, selectors, series, unmatched
from tests.deploy.running_commands import StartedCommand, start
from tests.ports import free_port

pytestmark = pytest.mark.process

#: One of each file: the other differs in its model and name alone (test_shipped_files.py).
COMMANDS = [
    "compose.yaml teacher-math",
    "compose.cpu.yaml teacher-sums",
    "compose.npu.yaml teacher-general",
    "kubernetes teacher-general",
    "systemd math",
]
KEYS = DEPLOY / "secrets" / "api_keys.example"
QUESTION = {"messages": [{"role": "user", "content": "3 + 4 ="}], "completion": "7"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StartedCommand]]:
    """Every command's teacher, ready."""
    tokenizer = tiny_models.sentencepiece_tokenizer()
    model = tiny_models.llama(tokenizer)
    model.config.max_position_embeddings = 8192  # what the files ask for
    folder = tiny_models.save(model, tokenizer, tmp_path_factory.mktemp("model"))
    chosen = {where: teacher_commands()[where] for where in COMMANDS}
    with ExitStack() as stack:
        found = start(stack, chosen, folder, KEYS, tmp_path_factory.mktemp("logs"))
        for command in found.values():
            command.teacher.until("/readyz", 200)
        yield found


def _key() -> str:
    (line,) = (line for line in KEYS.read_text().splitlines() if not line.startswith("#"))
    return line.split()[1]


def _ask(teacher: StartedCommand, **headers: str) -> httpx.Response:
    body = {"sequences": [QUESTION], "top_k": 8}
    return httpx.post(teacher.teacher.url + "/v1/logprobs", json=body, headers=headers, timeout=600)


def _healthy(test: list[str], port: int) -> bool:
    kind, _, *arguments = test
    assert kind == "CMD"
    there = [argument.replace(":8101/", f":{port}/") for argument in arguments]
    return not subprocess.run([sys.executable, *there], capture_output=True).returncode


@pytest.mark.parametrize("where", COMMANDS)
def test_a_shipped_command_serves_those_who_have_a_key(
    started: dict[str, StartedCommand], where: str
) -> None:
    assert _ask(started[where]).status_code == 401
    answer = _ask(started[where], Authorization=f"Bearer {_key()}")
    assert answer.status_code == 200, answer.text
    manifest = httpx.get(
        started[where].teacher.url + "/v1/manifest",
        headers={"Authorization": f"Bearer {_key()}"},
        timeout=600,
    ).json()
    asked, _ = settings_of(parser().parse_args(teacher_commands()[where]))
    assert manifest["service"] == asked.service_name
    assert manifest["max_top_k"] == min(asked.top_k_max, manifest["tokenizer_size"])


@pytest.mark.parametrize("file", TEACHER_FILES)
def test_a_health_check_tells_a_ready_teacher_from_none(
    started: dict[str, StartedCommand], file: str
) -> None:
    (where,) = (where for where in COMMANDS if where.startswith(f"{file} "))
    test = teachers(file)[where.split()[1]]["healthcheck"]["test"]
    assert _healthy(test, started[where].port)
    assert not _healthy(test, free_port())


def test_dashboard_and_alerts_ask_for_what_a_teacher_says(
    started: dict[str, StartedCommand],
) -> None:
    teacher = started["compose.yaml teacher-math"]
    assert _ask(teacher, Authorization=f"Bearer {_key()}").status_code == 200
    assert _ask(teacher).status_code == 401  # so that refusals have a series
    told = series(teacher.teacher.get("/metrics").text)
    asked = queries(DEPLOY / "grafana" / "dashboards" / "teachers.json")
    asked += queries(DEPLOY / "prometheus" / "alerts.yml")
    assert len(asked) > 15
    assert sum(len(selectors(query)) for query in asked) >= len(asked)
    assert {query: found for query in asked if (found := unmatched(query, told))} == {}


def test_a_metric_that_no_teacher_has_is_found(started: dict[str, StartedCommand]) -> None:
    told = series(started["compose.yaml teacher-math"].teacher.get("/metrics").text)
    assert unmatched("rate(mopd_tokens_scored_total[5m])", told) == []
    assert unmatched("rate(mopd_tokens_scored[5m])", told) == ["mopd_tokens_scored"]
    assert unmatched('sum by (phase) (mopd_queue_tokens{phase="queue"})', told) == [
        "mopd_queue_tokens"
    ]
