"""The Helm chart, rendered by Helm: objects, probes, references, metrics, and invalid values."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mopd_server.main import parser, settings_of
from mopd_server.settings import ListenSettings, TeacherSettings
from tests.deploy.chart import ChartError, findings, objects
from tests.deploy.compose_files import DEPLOY
from tests.deploy.node_groups import NODE_GROUPS
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
        {"name": "large", "model": "org/large", "nodes": 3, "replicas": 2, "tlsSecret": "tls"}
        | {"arguments": ["--tensor-parallel-size=8"]},
    ],
    "defaults": {"environment": [{"name": "HF_TOKEN", "value": "x"}], "nodeSelector": {"a": "b"}},
    "models": {"existingClaim": "shared"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "imagePullSecrets": [{"name": "registry"}],
}


def _of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects(EVERYTHING) if each["kind"] == kind}


def _templates() -> dict[str, dict[str, Any]]:
    """Return the pods that respond to requests, by the name of their Service."""
    templates = {name: each["spec"]["template"] for name, each in _of_kind("Deployment").items()}
    group = _group()["leaderWorkerTemplate"]
    return {**templates, "teacher-large": group["leaderTemplate"]}


def _group() -> dict[str, Any]:
    return _of_kind("LeaderWorkerSet")["teacher-large-nodes"]["spec"]


def _pod(name: str) -> dict[str, Any]:
    return _templates()[name]["spec"]


def _settings(name: str) -> tuple[TeacherSettings, ListenSettings]:
    return settings_of(parser().parse_args(_pod(name)["containers"][0]["args"]))


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_objects_follow_the_schema_of_kubernetes(values: dict[str, Any], tmp_path: Path) -> None:
    assert findings() == []
    kinds = Counter(each["kind"] for each in objects(values))
    expected = Counter(Deployment=2, Service=4, PodDisruptionBudget=2)
    if values:
        large = Counter(LeaderWorkerSet=1, NetworkPolicy=1, Service=2, PodDisruptionBudget=1)
        assert kinds == expected + large + Counter(HorizontalPodAutoscaler=1, PodMonitor=3)
    else:
        assert kinds == expected + Counter(PersistentVolumeClaim=1)
    foreign = ("PodMonitor", "LeaderWorkerSet")  # of other projects
    known = [each for each in objects(values) if each["kind"] not in foreign]
    for each in objects(values):
        if each["kind"] == "LeaderWorkerSet":
            jsonschema.validate(each, NODE_GROUPS)
            known += [
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}}
                | {"template": each["spec"]["leaderWorkerTemplate"][role]}
                for role in ("leaderTemplate", "workerTemplate")
            ]
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(known))
    passes(BIN / "kubernetes-validate", "--strict", tmp_path / "objects.yaml")


def test_values_of_the_documentation_are_valid() -> None:
    readme = (DEPLOY / "README.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", readme, re.S)
    names = {each["metadata"]["name"] for each in objects(yaml.safe_load(example))}
    teachers = {f"teacher-{name}" for name in ("math", "small", "large")}
    assert names == {*teachers, *(f"{each}-replicas" for each in teachers)} | {
        "teacher-large-nodes",
        "mopd-models",
    }


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
    budgets, deployments = _of_kind("PodDisruptionBudget"), _of_kind("Deployment")
    for name, template in _templates().items():
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
        selector = services[name]["spec"]["selector"]
        assert selector.items() <= template["metadata"]["labels"].items()
        if name in deployments:
            assert deployments[name]["spec"]["selector"]["matchLabels"] == selector
        assert monitors[name]["spec"]["selector"]["matchLabels"] == selector
        members = budgets[name]["spec"]["selector"]["matchLabels"]
        assert members.items() < selector.items()
        replicas = services[f"{name}-replicas"]["spec"]
        assert (replicas["clusterIP"], replicas["publishNotReadyAddresses"]) == ("None", False)
        assert "clusterIP" not in services[name]["spec"]
        assert replicas["selector"] == selector
        assert replicas["ports"] == services[name]["spec"]["ports"]
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


def test_only_the_first_pod_of_a_replica_of_several_nodes_responds() -> None:
    group = _group()
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (2, 3)
    teacher, _ = _settings("teacher-large")
    assert (teacher.pipeline_parallel_size, teacher.tensor_parallel_size) == (3, 8)
    assert teacher.vllm_arg == ("distributed_executor_backend=ray",)
    server, worker = (
        group["leaderWorkerTemplate"][role] for role in ("leaderTemplate", "workerTemplate")
    )
    (first,), (other,) = (each["spec"]["containers"] for each in (server, worker))
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe"} & other.keys()
    assert first["resources"] == other["resources"]
    assert {each["name"] for each in other["volumeMounts"]} == {"models", "shared-memory"}
    services = _of_kind("Service")
    for name in ("teacher-large", "teacher-large-replicas"):
        selector = services[name]["spec"]["selector"]
        assert not selector.items() <= worker["metadata"]["labels"].items()
    members = _of_kind("PodDisruptionBudget")["teacher-large"]["spec"]["selector"]["matchLabels"]
    policy = _of_kind("NetworkPolicy")["teacher-large"]["spec"]
    assert policy["podSelector"]["matchLabels"] == members
    inside, outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": members}}]}
    assert outside == {"ports": [{"port": 8101}]}
    for template in (server, worker):
        assert members.items() <= template["metadata"]["labels"].items()


def test_the_autoscaler_of_several_nodes_scales_groups() -> None:
    values = {"name": "a", "model": "m", "nodes": 2, "autoscaling": {"enabled": True}}
    kinds = {each["kind"]: each for each in objects({"teachers": [values]})}
    target = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    group = kinds["LeaderWorkerSet"]
    assert (target["apiVersion"], target["kind"]) == (group["apiVersion"], group["kind"])
    assert target["name"] == group["metadata"]["name"]
    assert "replicas" not in group["spec"]


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_scripts_of_a_group_are_posix_shell(role: str) -> None:
    template = _group()["leaderWorkerTemplate"][f"{role}Template"]
    (container,) = template["spec"]["containers"]
    script = [*container["command"], *container["args"]][2]
    passes("sh", "-n", "-c", script)


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({"teacher": []}, "teacher"),
        ({"teachers": [{"name": "a", "model": "m", "replica": 2}]}, "replica"),
        ({"teachers": [{"name": "a", "model": "m"}] * 2}, '"a"'),
        ({"teachers": [{"name": "A_b", "model": "m"}]}, "/teachers/0/name"),
        ({"teachers": [{"name": "a"}]}, "model"),
        ({"teachers": [{"name": "a" * 36, "model": "m"}]}, "/teachers/0/name"),
        (
            {"teachers": [{"name": name, "model": "m"} for name in ("a-replicas", "a")]},
            '"a-replicas"',
        ),
        ({"teachers": [{"name": "a", "model": "m", "nodes": 0}]}, "nodes"),
        (
            {"teachers": [{"name": "a", "model": "m", "nodes": 2, "engine": "transformers"}]},
            "transformers",
        ),
        ({"defaults": {"autoscaling": {"queueTokens": 0}}}, "queueTokens"),
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ChartError, match=culprit):
        objects(values)
