"""Reads the files under ``deploy`` as their tools would: variables filled in, anchors merged."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import objects

DEPLOY = Path(__file__).parents[2] / "deploy"

#: Compose files with teachers in them.
TEACHER_FILES = ("compose.yaml", "compose.cpu.yaml", "compose.npu.yaml")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}")


def compose(name: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A compose file with its variables' values, or their defaults."""
    values = variables or {}
    text = (DEPLOY / name).read_text()
    filled = _VARIABLE.sub(lambda m: values.get(m["name"], m["default"]), text)
    assert "$" not in re.sub("#.*", "", filled), f"{name} has a variable without a default"
    return yaml.safe_load(filled)


def teachers(name: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file that are teachers."""
    services = compose(name)["services"]
    return {name: service for name, service in services.items() if name.startswith("teacher-")}


def containers() -> dict[str, dict[str, Any]]:
    """Deployment name -> its one container."""
    containers: dict[str, dict[str, Any]] = {}
    for manifest in objects():
        if manifest["kind"] == "Deployment":
            (containers[manifest["metadata"]["name"]],) = manifest["spec"]["template"]["spec"][
                "containers"
            ]
    return containers


def unit_command(instance: str) -> list[str]:
    """The command that systemd starts for this instance, with its example settings."""
    folder = DEPLOY / "systemd"
    lines = (folder / f"{instance}.env.example").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines)
    unit = (folder / "mopd-teacher@.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    start = re.sub(r"\$\{(\w+)\}", lambda m: settings[m[1]], start).replace("%i", instance)
    return shlex.split(start)


def teacher_commands() -> dict[str, list[str]]:
    """File and service name -> the arguments of ``mopd-teacher``, for every deployed teacher."""
    commands = {
        f"{file} {name}": service["command"]
        for file in TEACHER_FILES
        for name, service in teachers(file).items()
    }
    commands |= {
        f"kubernetes {name}": container["args"] for name, container in containers().items()
    }
    executable, *arguments = unit_command("math")
    assert os.path.basename(executable) == "mopd-teacher"
    return commands | {"systemd math": arguments}


def ray_job() -> dict[str, Any]:
    """The run on KubeRay."""
    return yaml.safe_load((DEPLOY / "kubernetes" / "ray" / "training.yaml").read_text())


def ray_groups() -> list[dict[str, Any]]:
    """The pods of its cluster: the head's, then each worker group's."""
    cluster = ray_job()["spec"]["rayClusterSpec"]
    return [{"replicas": 1, **cluster["headGroupSpec"]}, *cluster["workerGroupSpecs"]]
