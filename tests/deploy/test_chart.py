"""The Helm chart, rendered by Helm: objects, probes, references, metrics, and invalid values."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd_server.main import parser, settings_of
from mopd_server.settings import ListenSettings, TeacherSettings
from tests.deploy.chart import ChartError, findings, objects
from tests.deploy.compose_files import DEPLOY
from tests.deploy.test_shipped_files import passes

BIN = Path(sys.executable).parent

#: Every option of the chart in use; the second teacher differs in each.
EVERYTHING: dict[str, Any] = {
    "teachers": [
        {"name": "math", "model": "/models/math", "tlsSecret": "math-tls", "replicas": 3}
        | {"autoscaling": {"enabled": True, "queueTokens": 2_000_000}},
        {"name": "small", "model": "org/small", "engine": "transformers", "image": "mopd-teacher:1"}
        | {"apiKeySecret": "", "arguments": [], "resources": {"limits": {"nvidia.com/gpu": 0}}}
        | {"livenessSeconds": 90, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    ],
    "defaults": {"environment": [{"name": "HF_TOKEN", "value": "x"}], "nodeSelector": {"a": "b"}},
    "models": {"existingClaim": "shared"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "imagePullSecrets": [{"name": "registry"}],
}


def _of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects(EVERYTHING) if each["kind"] == kind}


def _pod(name: str) -> dict[str, Any]:
    return _of_kind("Deployment")[name]["spec"]["template"]["spec"]


def _settings(name: str) -> tuple[TeacherSettings, ListenSettings]:
    return settings_of(parser().parse_args(_pod(name)["containers"][0]["args"]))


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_objects_follow_the_schema_of_kubernetes(values: dict[str, Any], tmp_path: Path) -> None:
    assert findings() == []
    kinds = Counter(each["kind"] for each in objects(values))
    expected = Counter(Deployment=2, Service=2, PodDisruptionBudget=2)
    if values:
        assert kinds == expected + Counter(HorizontalPodAutoscaler=1, PodMonitor=2)
    else:
        assert kinds == expected + Counter(PersistentVolumeClaim=1)
    known = [each for each in objects(values) if each["kind"] != "PodMonitor"]  # the operator's
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(known))
    passes(BIN / "kubernetes-validate", "--strict", tmp_path / "objects.yaml")


def test_values_of_the_documentation_are_valid() -> None:
    readme = (DEPLOY / "README.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", readme, re.S)
    names = {each["metadata"]["name"] for each in objects(yaml.safe_load(example))}
    assert names == {"teacher-math", "teacher-small", "mopd-models"}


def test_values_of_a_teacher_replace_the_defaults() -> None:
    (math, math_listen), (small, small_listen) = (
        _settings("teacher-math"),
        _settings("teacher-small"),
    )
    assert (math.model, math.engine, math.max_model_len) == ("/models/math", "vllm", 8192)
    assert (small.model, small.engine, small.max_model_len) == ("org/small", "transformers", None)
    assert (math_listen.liveness_seconds, small_listen.liveness_seconds) == (300, 90)
    assert str(math_listen.api_key_file) == "/run/secrets/mopd/api_keys"
    assert small_listen.api_key_file is None
    pods = {name: _pod(f"teacher-{name}") for name in ("math", "small")}
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items()}
    assert images == {"math": "mopd-teacher:gpu", "small": "mopd-teacher:1"}
    assert "tolerations" not in pods["math"]
    assert pods["small"]["tolerations"][0]["key"] == "gpu"
    for pod in pods.values():
        assert pod["nodeSelector"] == {"a": "b"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert [each["name"] for each in pod["containers"][0]["env"]] == ["HF_HOME", "HF_TOKEN"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "shared"
        assert {each["name"] for each in pod["containers"][0]["volumeMounts"]} == set(volumes)
        assert pod["terminationGracePeriodSeconds"] > ListenSettings.drain_seconds


def test_probes_metrics_and_service_use_the_port_and_scheme_of_the_teacher() -> None:
    services, monitors = _of_kind("Service"), _of_kind("PodMonitor")
    budgets = _of_kind("PodDisruptionBudget")
    for name, deployment in _of_kind("Deployment").items():
        template = deployment["spec"]["template"]
        (container,) = template["spec"]["containers"]
        _, listen = _settings(name)
        (port,) = container["ports"]
        assert port["containerPort"] == listen.port == services[name]["spec"]["ports"][0]["port"]
        scheme = {"scheme": "HTTPS"} if listen.tls_certificate else {}
        for probe, path in (
            ("startup", "/healthz"),
            ("liveness", "/healthz"),
            ("readiness", "/readyz"),
        ):
            settings = container[f"{probe}Probe"]
            assert settings["httpGet"] == {"path": path, "port": port["name"], **scheme}
            assert settings["timeoutSeconds"] >= 5
        (endpoint,) = monitors[name]["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
        assert endpoint.get("scheme", "http").upper() == scheme.get("scheme", "HTTP")
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= template["metadata"]["labels"].items()
        assert services[name]["spec"]["selector"] == selector
        for each in (monitors, budgets):
            assert each[name]["spec"]["selector"]["matchLabels"] == selector
        assert monitors[name]["metadata"]["labels"]["release"] == "prometheus"
        assert set(monitors[name]["spec"]["podTargetLabels"]) <= set(selector)
        assert budgets[name]["spec"]["maxUnavailable"] == 1
    mounts = _pod("teacher-math")["containers"][0]["volumeMounts"]
    tls = next(each["mountPath"] for each in mounts if each["name"] == "tls")
    assert {Path(tls)} == {_settings("teacher-math")[1].tls_key.parent}  # type: ignore[union-attr]


def test_replicas_belong_to_the_autoscaler_and_are_replaced_without_another_accelerator() -> None:
    deployments = {name: each["spec"] for name, each in _of_kind("Deployment").items()}
    (scaler,) = _of_kind("HorizontalPodAutoscaler").values()
    target = scaler["spec"]["scaleTargetRef"]
    assert deployments[target["name"]]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert "replicas" not in deployments[target["name"]]
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "2000000"
    small = deployments["teacher-small"]
    assert (small["replicas"], small["strategy"]["type"]) == (1, "Recreate")


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({"teacher": []}, "teacher"),
        ({"teachers": [{"name": "a", "model": "m", "replica": 2}]}, "replica"),
        ({"teachers": [{"name": "a", "model": "m"}] * 2}, '"a"'),
        ({"teachers": [{"name": "A_b", "model": "m"}]}, "/teachers/0/name"),
        ({"teachers": [{"name": "a"}]}, "model"),
        ({"defaults": {"autoscaling": {"queueTokens": 0}}}, "queueTokens"),
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ChartError, match=culprit):
        objects(values)
