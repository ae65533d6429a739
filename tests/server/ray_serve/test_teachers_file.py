"""The file of ``mopd-teacher deploy``: what is accepted, and which setting an error names."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd_protocol.errors import ConfigError
from mopd_server.ray_serve.autoscaling import QUEUE_TOKENS
from mopd_server.ray_serve.cluster import deployment_options
from mopd_server.ray_serve.teachers_file import (
    Autoscaling,
    DeployedTeacher,
    TeachersFile,
    load_teachers_file,
)
from mopd_server.settings import ListenSettings, TeacherSettings

MATH: dict[str, Any] = {"name": "math", "model": "org/math"}


def loaded(folder: Path, values: Any) -> TeachersFile:
    path = folder / "teachers.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return load_teachers_file(path)


def teacher(**changes: Any) -> DeployedTeacher:
    return DeployedTeacher(**{**MATH, **changes})


def test_a_file_has_the_settings_and_defaults_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    options = {
        "model": "model",
        "adapter": ["a=model", "b=org/b"],
        "max_model_len": 64,
        "key_weights": {"alice": 2, "bob": 0.5},
    }
    scaled = {"name": "code", "model": "org/code", "replicas": {"min": 2, "max": 6}}
    file = loaded(
        tmp_path,
        {"teachers": [{**MATH, **options}, scaled], "api_key_file": "keys", "drain_seconds": 9},
    )
    math, code = file.teachers
    assert math.settings() == TeacherSettings(
        name="math",
        model=str(model),
        adapter=(f"a={model}", "b=org/b"),
        max_model_len=64,
        key_weights=(("alice", 2.0), ("bob", 0.5)),
    )
    assert (math.replicas, math.num_cpus, math.num_gpus) == (1, 1.0, None)
    assert isinstance(code.replicas, Autoscaling)
    assert code.settings() == TeacherSettings(name="code", model="org/code")
    assert file.listen() == ListenSettings(
        port=8000, api_key_file=Path("keys").resolve(), drain_seconds=9.0
    )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replica": 2}, "teachers.0.replica"),
        ({"replicas": 0}, "teachers.0.replicas"),
        ({"replicas": {"min": 3, "max": 2}}, "teachers.0.replicas"),
        ({"replicas": {"min": 1}}, "teachers.0.replicas.max"),
        ({"replicas": {"max": 2, "queue_tokens": 0}}, "teachers.0.replicas.queue_tokens"),
        ({"max_model_len": 0}, "teachers.0.max_model_len"),
        ({"max_model_len": "long"}, "teachers.0.max_model_len"),
        ({"top_k_max": -1}, "teachers.0.top_k_max"),
        ({"gpu_memory_utilization": 1.5}, "teachers.0.gpu_memory_utilization"),
        ({"num_gpus": -1}, "teachers.0.num_gpus"),
        ({"num_cpus": float("inf")}, "teachers.0.num_cpus"),
        ({"dtype": "int8"}, "teachers.0.dtype"),
        ({"engine": "sglang"}, "teachers.0.engine"),
        ({"name": "a/b"}, "teachers.0.name"),
        ({"name": None}, "teachers.0.name"),
        ({"model": None}, "teachers.0.model"),
        ({"multi_node": True}, "teachers.0.multi_node"),
        (
            {"multi_node": True, "engine": "vllm", "data_parallel_size": 2},
            "teachers.0.multi_node",
        ),
    ],
)
def test_an_invalid_teacher_is_one_sentence_with_its_setting(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, {"teachers": [{**MATH, **changes}]})
    assert caught.value.key == key
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ("", "teachers"),
        ("[1]", "teachers"),
        ("a: [", "file"),
        ({"teachers": []}, "teachers"),
        ({"teachers": [MATH, MATH]}, "teachers"),
        ({"teachers": [MATH], "ports": 1}, "ports"),
        ({"teachers": [MATH], "port": 0}, "port"),
        ({"teachers": [MATH], "request_timeout_seconds": 0}, "request_timeout_seconds"),
        ({"teachers": [MATH], "key_requests_in_flight": -1}, "key_requests_in_flight"),
    ],
)
def test_an_invalid_file_is_one_sentence_with_its_setting(
    tmp_path: Path, values: Any, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, values)
    assert caught.value.key == key
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_teachers_file(tmp_path / "teachers.yaml")
    assert caught.value.key == "file"


def test_accelerators_follow_from_the_parallel_sizes_and_the_cluster() -> None:
    parallel = teacher(engine="vllm", tensor_parallel_size=4)
    assert deployment_options(parallel, cluster_gpus=8)["ray_actor_options"]["num_gpus"] == 4
    for each, gpus in ((parallel, 0.0), (teacher(device="cpu"), 8.0)):
        assert "num_gpus" not in deployment_options(each, cluster_gpus=gpus)["ray_actor_options"]
    shared = teacher(num_gpus=0.5, num_cpus=0.25, resources={"NPU": 1})
    actor = deployment_options(shared, cluster_gpus=8)["ray_actor_options"]
    assert actor == {"num_gpus": 0.5, "num_cpus": 0.25, "resources": {"NPU": 1.0}}


def test_a_teacher_over_several_nodes_has_a_bundle_for_each_accelerator() -> None:
    large = teacher(
        engine="vllm",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        multi_node=True,
        vllm_arg=["kv_cache_dtype=fp8"],
    )
    options = deployment_options(large, cluster_gpus=8)
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1}, *[{"GPU": 1}] * 3]
    assert "num_gpus" not in options["ray_actor_options"]
    assert large.settings().vllm_arg == (
        "kv_cache_dtype=fp8",
        "distributed_executor_backend=ray",
    )


def test_replicas_follow_from_the_tokens_in_all_queues() -> None:
    options = deployment_options(
        teacher(replicas={"min": 1, "max": 4, "queue_tokens": 1000}), cluster_gpus=0
    )
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert "num_replicas" not in options
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)

    def replicas(*queues: float) -> int:
        reported = {QUEUE_TOKENS: dict(enumerate(queues))} if queues else {}
        return policy(Reported(reported))[0]

    assert replicas(0, 0) == 0
    assert replicas(400, 600) == 1
    assert replicas(400, 601) == 2
    assert replicas(5000) == 5
    assert replicas() == 3  # nothing reported: no change


class Reported:
    """The part of Ray Serve's context that the policy uses."""

    target_num_replicas = 3

    def __init__(self, metrics: dict[str, dict[int, float]]) -> None:
        self.aggregated_metrics = metrics
