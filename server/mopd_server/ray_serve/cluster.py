"""``ServeCluster``: the teachers of a file on a Ray cluster.

Each teacher is an application of Ray Serve, since an application has one route: ``/NAME``.
"""

# ray has incomplete annotations, and need not be installed for type checking.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

import logging
import os
import re
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.context import _get_global_client  # pyright: ignore[reportPrivateUsage]
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from mopd_protocol.errors import ConfigError, first_line
from mopd_server.http.middleware.authentication import KEYS_VARIABLE
from mopd_server.ray_serve.autoscaling import QueuePolicy
from mopd_server.ray_serve.replica import TeacherReplica
from mopd_server.ray_serve.teachers_file import Autoscaling, DeployedTeacher, TeachersFile

#: The queue of the service limits requests, by tokens: Serve forwards all of them.
_MAX_ONGOING_REQUESTS = 10_000
_HEALTH_CHECK_SECONDS = 5.0
#: Of a traceback in Serve's messages, whose last one is the cause.
_ERROR_LINE = re.compile(r"^[\w.]*?(\w+(?:Error|Exception): (?!Traceback).*)", re.MULTILINE)


@dataclass(frozen=True)
class TeacherStatus:
    """State of one teacher."""

    name: str
    address: str
    state: str
    """Application status of Ray Serve (``RUNNING``), or ``NOT_DEPLOYED``."""
    running: int
    """Replicas that accept requests."""
    replicas: int
    """These, and those that start or stop."""
    message: str

    @property
    def ready(self) -> bool:
        """True if all replicas accept requests."""
        return self.state == ApplicationStatus.RUNNING

    @property
    def failed(self) -> bool:
        """True if no replica can start."""
        return self.state == ApplicationStatus.DEPLOY_FAILED

    def __str__(self) -> str:
        line = f"{self.name:<16} {self.state:<13} {self.running}/{self.replicas} replicas"
        return f"{line}  {self.address}" if self.ready else f"{line}  {self.message}".rstrip()


class ServeCluster:
    """A connection to a cluster, for the teachers of a file.

    Without an address, that of this machine is used, or (unless ``existing`` is set) a new one that
    ends with this process.

    Raises:
        ConfigError: if there is no cluster.
    """

    def __init__(self, file: TeachersFile, address: str | None, *, existing: bool) -> None:
        self._file = file
        self._names = [teacher.name for teacher in file.teachers]
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # For a new cluster: replicas would have the niceness 15, so that they starve next to a
        # trainer, and the proxy 5 s for its imports.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        address = address or ("auto" if existing else None)
        try:
            # The dashboard takes longer to start than the rest of a new cluster, or fails.
            ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises this class if a node starts too slowly
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ConfigError(
                f"--address: no Ray cluster at {address or 'local'}: {reason}. Start one with ray "
                "start --head, or pass the address of one.",
                key="address",
            ) from error

    def deploy(self) -> None:
        """Start or update the teachers; returns before they are ready.

        Raises:
            ConfigError: if Ray Serve does not start, or listens on another port of this cluster.
        """
        file, listen = self._file, self._file.listen()
        keys = os.environ.get(KEYS_VARIABLE, "")
        running = _get_global_client(raise_if_no_controller_running=False)
        if running is not None and running.http_config.port != file.port:
            raise ConfigError(
                f"port: Ray Serve of this cluster listens on another port (found {file.port}, "
                f"expected {running.http_config.port}).",
                key="port",
            )
        try:
            serve.start(
                proxy_location="EveryNode",
                http_options={
                    "host": file.host,
                    "port": file.port,
                    "ssl_certfile": listen.tls_certificate and str(listen.tls_certificate),
                    "ssl_keyfile": listen.tls_key and str(listen.tls_key),
                },
            )
        except RayError as error:
            raise ConfigError(
                f"port: Ray Serve did not start at port {file.port}: {first_line(error)}. Use a "
                "free port, and see the logs of Ray.",
                key="port",
            ) from error
        gpus = ray.cluster_resources().get("GPU", 0.0)
        targets = [
            serve.RunTarget(
                serve.deployment(
                    name=teacher.name,
                    graceful_shutdown_timeout_s=file.drain_seconds,
                    **deployment_options(teacher, cluster_gpus=gpus),
                )(TeacherReplica).bind(teacher.settings(), listen, keys),
                name=teacher.name,
                route_prefix=f"/{teacher.name}",
            )
            for teacher in file.teachers
        ]
        serve.run_many(
            targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def statuses(self) -> list[TeacherStatus]:
        """Return the state of each teacher of the file."""
        applications = serve.status().applications
        return [self._status(name, applications.get(name)) for name in self._names]

    def remove(self) -> None:
        """Remove the teachers once their requests in flight are finished; others keep running."""
        for name in serve.status().applications.keys() & set(self._names):
            serve.delete(name)

    def _status(self, name: str, application: ApplicationStatusOverview | None) -> TeacherStatus:
        scheme = "https" if self._file.tls_certificate else "http"
        address = f"{scheme}://{self._file.host}:{self._file.port}/{name}"
        if application is None:
            return TeacherStatus(name, address, "NOT_DEPLOYED", 0, 0, "")
        deployments = application.deployments.values()
        counts = [(s, n) for each in deployments for s, n in each.replica_states.items()]
        running = sum(number for state, number in counts if state == "RUNNING")
        texts = [application.message, *(each.message for each in deployments)]
        errors = [line for text in texts for line in _ERROR_LINE.findall(text)]
        message = " ".join((errors or ["", *filter(None, texts)])[-1].split())
        return TeacherStatus(
            name, address, application.status.value, running, sum(n for _, n in counts), message
        )


def deployment_options(teacher: DeployedTeacher, *, cluster_gpus: float) -> dict[str, Any]:
    """Return Ray Serve's options: number, resources and placement of replicas."""
    actor: dict[str, Any] = {"num_cpus": teacher.num_cpus, "resources": teacher.resources}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
        "health_check_period_s": _HEALTH_CHECK_SECONDS,
        "logging_config": {"enable_access_log": False},  # the service logs every request
    }
    if teacher.multi_node:
        # vLLM places one worker in each bundle. The replica, in the first one, reserves no
        # accelerator, but must not hide any: vLLM detects the platform in its process.
        first = {"CPU": teacher.num_cpus, "GPU": 1, **teacher.resources}
        options["placement_group_bundles"] = [first, *[{"GPU": 1}] * (teacher.accelerators - 1)]
        options["placement_group_strategy"] = "PACK"
        actor["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    elif teacher.num_gpus is not None:
        actor["num_gpus"] = teacher.num_gpus
    elif cluster_gpus and teacher.device != "cpu":
        actor["num_gpus"] = teacher.accelerators
    if isinstance(replicas := teacher.replicas, Autoscaling):
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            upscale_delay_s=replicas.upscale_seconds,
            downscale_delay_s=replicas.downscale_seconds,
            policy=AutoscalingPolicy(
                policy_function=QueuePolicy, policy_kwargs={"queue_tokens": replicas.queue_tokens}
            ),
        )
    else:
        options["num_replicas"] = replicas
    return options
