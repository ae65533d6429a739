"""Compose files, images and manifests: checked by their tools, and against each other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd_server.main import parser, settings_of
from mopd_trainer.config.loading import load_run
from tests.deploy.chart import objects
from tests.deploy.compose_files import (
    DEPLOY,
    TEACHER_FILES,
    compose,
    ray_groups,
    ray_job,
    teacher_commands,
    teachers,
)
from tests.deploy.test_lock import locked_versions

ROOT = DEPLOY.parent
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE_FILES = sorted(DEPLOY.glob("compose*.yaml"))
COMMANDS = teacher_commands()


def passes(*command: str | Path) -> None:
    """Run a checker; its exit status must be 0."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_compose_files_follow_the_schema_of_compose() -> None:
    assert len(COMPOSE_FILES) == 4
    passes(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE_FILES)


def test_dockerfiles_pass_their_linter() -> None:
    assert len(DOCKERFILES) == 4
    passes(BIN / "hadolint", "--failure-threshold", "info", *DOCKERFILES)


def test_pods_of_the_ray_job_follow_the_schema_of_kubernetes(tmp_path: Path) -> None:
    files = [DEPLOY / "kubernetes" / "ray" / "runs.yaml"]
    for number, group in enumerate(ray_groups()):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}}
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump({**template, "template": group["template"]}))
    passes(BIN / "kubernetes-validate", "--strict", *files)


def test_the_ray_job_has_the_resources_of_its_run() -> None:
    # The schema of RayJob itself is KubeRay's; here are the fields of its reference that are used.
    job = ray_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    settings = DEPLOY / "kubernetes" / "ray" / "run.yaml"
    run = load_run(settings)
    pods = [group["template"]["spec"]["containers"][0] for group in ray_groups()]
    mounts = {mount["mountPath"] for pod in pods for mount in pod["volumeMounts"]}
    assert job["spec"]["entrypoint"] == f"mopd train /etc/mopd/{settings.name}"
    assert {"/etc/mopd", str(run.output_dir.parent), str(Path(run.data.prompts).parent)} <= mounts
    assert run.resources is not None
    assert run.resources.address == "auto"
    devices = [
        group["replicas"] * pod["resources"]["limits"].get("nvidia.com/gpu", 0)
        for group, pod in zip(ray_groups(), pods, strict=True)
    ]
    assert sum(devices) == run.resources.student
    services = {f["metadata"]["name"]: f["spec"] for f in objects() if f["kind"] == "Service"}
    for teacher in run.teachers.values():
        (url,) = teacher.url
        service = re.fullmatch(r"dns\+http://([\w-]+):8101", url)[1]  # type: ignore[index]
        assert services[service]["clusterIP"] == "None"
        assert all(teacher.api_key_env in [e["name"] for e in pod["env"]] for pod in pods)
    assert locked_versions("ray") == [job["spec"]["rayClusterSpec"]["rayVersion"]]
    kept = DEPLOY / "kubernetes" / "ray" / "kustomization.yaml"
    listed = yaml.safe_load(kept.read_text())
    assert [*listed["resources"], *listed["configMapGenerator"][0]["files"]] == sorted(
        (file.name for file in kept.parent.iterdir() if file != kept),
        key=["runs.yaml", "training.yaml", "run.yaml"].index,
    )


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_images_are_pinned_labelled_and_not_run_by_root(file: Path) -> None:
    text = file.read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    stages = re.findall(r"^FROM (\S+)", text, re.M)
    assert len(stages) > 1
    for stage in stages:
        image = re.sub(r"\$\{(\w+)\}", lambda m: defaults[m[1]], stage)
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
    last = text.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)$", last, re.M)[-1] == "10001"
    assert 'org.opencontainers.image.title="mopd-' in last
    for requirement in re.findall(r" ([\w-]+)==", text):
        assert requirement in ("build", "torch", "uv")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_what_images_copy_exists_and_is_let_through(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), re.M):
        for source in copied.split():
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in allowed


def test_the_wheels_stage_copies_all_that_the_wheel_is_made_of() -> None:
    described = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'^    "(\w+)/mopd_\w+",$', described, re.M)
    assert len(packages) == 5
    packages.append("mopd")
    for file in DOCKERFILES:
        stage = file.read_text().partition("\nFROM ")[2]
        for package in packages:
            assert f"COPY {package} {package}\n" in file.read_text(), (file.name, stage)


@pytest.mark.parametrize("where", COMMANDS)
def test_every_option_is_one_of_the_teachers(where: str) -> None:
    teacher, listen = settings_of(parser().parse_args(COMMANDS[where]))
    assert teacher.service_name in ("math", "general", "sums", "words")
    assert listen.api_key_file is not None
    assert listen.port == 8101
    assert teacher.trust_remote_code is False


@pytest.mark.parametrize("file", TEACHER_FILES)
def test_teachers_are_checked_published_and_stopped_as_they_listen(file: str) -> None:
    services = teachers(file)
    assert len(services) == 2
    published: set[str] = set()
    for name, service in services.items():
        settings, listen = settings_of(parser().parse_args(service["command"]))
        assert name == f"teacher-{settings.service_name}"
        assert f"http://127.0.0.1:{listen.port}/readyz" in service["healthcheck"]["test"][-1]
        address, outside, inside = service["ports"][0].split(":")
        assert address == "127.0.0.1"
        assert int(inside) == listen.port
        published.add(outside)
        assert str(listen.api_key_file) == f"/run/secrets/{service['secrets'][0]}"
        assert int(service["stop_grace_period"].removesuffix("s")) > listen.drain_seconds
        assert service["restart"] == "unless-stopped"
        assert "memory" in service["deploy"]["resources"]["reservations"]
        assert any(volume.startswith("models:/models") for volume in service["volumes"])
    assert len(published) == 2


def test_gpu_teachers_have_a_gpu_each_and_npu_teachers_the_driver() -> None:
    gpus = [
        device["device_ids"][0]
        for service in teachers("compose.yaml").values()
        for device in service["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert gpus == ["0", "1"]
    npus = [service["devices"] for service in teachers("compose.npu.yaml").values()]
    assert [devices[0] for devices in npus] == ["/dev/davinci0", "/dev/davinci1"]
    for service in teachers("compose.npu.yaml").values():
        assert "/dev/davinci_manager" in service["devices"]
        assert any("/Ascend/driver/lib64" in volume for volume in service["volumes"])


def test_services_build_existing_files() -> None:
    for file in COMPOSE_FILES:
        for service in compose(file.name)["services"].values():
            build = service.get("build")
            assert build is not None or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
            if build is not None:
                assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
            for volume in service["volumes"]:
                source = volume.split(":")[0]
                assert not source.startswith(".") or (DEPLOY / source).exists(), source


def test_the_student_of_the_cpu_file_uses_its_teachers() -> None:
    run = load_run(DEPLOY / "run.cpu.yaml")
    services = teachers("compose.cpu.yaml")
    addresses = {name.removeprefix("teacher-"): (f"http://{name}:8101",) for name in services}
    assert {name: teacher.url for name, teacher in run.teachers.items()} == addresses
    (models,) = (volume for volume in services["teacher-sums"]["volumes"])
    assert models == "models:/models:ro"
    student = compose("compose.cpu.yaml")["services"]["student"]
    assert student["command"][-1] == student["volumes"][-1].split(":")[1]
    assert all(teacher.api_key_env in student["environment"] for teacher in run.teachers.values())


def test_prometheus_scrapes_every_teacher_under_its_name() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    scraped = {
        target: entry["labels"]["teacher"]
        for entry in job["static_configs"]
        for target in entry["targets"]
    }
    for file in ("compose.yaml", "compose.npu.yaml"):
        assert {f"{n}:8101": n.removeprefix("teacher-") for n in teachers(file)} == scraped


def test_grafana_finds_its_dashboard_and_its_source() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "teachers.yaml").read_text())[
        "providers"
    ]
    services = compose("compose.observability.yaml")["services"]
    mounts = {v.split(":")[1]: v.split(":")[0] for v in services["grafana"]["volumes"]}
    folder = DEPLOY / mounts[provider["options"]["path"]]
    board: dict[str, Any] = json.loads((folder / "teachers.json").read_text())
    assert all(panel["datasource"]["uid"] == source["uid"] for panel in board["panels"])
    assert source["url"].removeprefix("http://").split(":")[0] in services
