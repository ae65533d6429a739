"""Options of the command line for teachers on a Ray cluster."""

import argparse
from pathlib import Path

from mopd_server.options import port

DEPLOY_EXAMPLE = """\
example: a teacher of two to six replicas, and one that needs two nodes with eight GPUs each

  teachers:
    - name: math
      model: Qwen/Qwen3-4B
      replicas: {min: 2, max: 6, queue_tokens: 100000}   # or a number
    - name: general
      model: meta-llama/Llama-3.1-405B-Instruct
      engine: vllm
      tensor_parallel_size: 8
      pipeline_parallel_size: 2
      multi_node: true

  ray start --head                         # on the first node; "ray start --address" on the others
  mopd-teacher deploy teachers.yaml --detach
  mopd train run.yaml teachers.math.url=http://HEAD:8000/math

A teacher has the settings of "mopd-teacher serve" with underscores (max_model_len, top_k_max,
vllm_arg, ...), and replicas, num_gpus, num_cpus, resources and multi_node. Next to "teachers", the
file has settings of requests and the address: host, port, api_key_file, key_tokens_per_minute,
max_body_bytes, drain_seconds, ... Models, keys and mopd must be present on every node.

exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if a teacher cannot start, 2 for an invalid
option. The last line on stderr is the cause.
"""


def add_deploy_options(deploy: argparse.ArgumentParser) -> None:
    """Add the options of ``mopd-teacher deploy``."""
    deploy.add_argument("file", metavar="FILE", type=Path, help="YAML file with teachers")
    deploy.add_argument(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster: auto, ray://HOST:10001 or HOST:6379; local: a new one on this machine, "
        "which ends with the command (default: that of RAY_ADDRESS or of this machine, else local)",
    )
    deploy.add_argument("--port", type=port, help="HTTP port (default: that of FILE, or 8000)")
    deploy.add_argument(
        "--detach", action="store_true", help="exit once all are ready, and leave them running"
    )
    actions = deploy.add_mutually_exclusive_group()
    for action, meaning in (
        ("status", "print the teachers' states, and exit"),
        ("stop", "finish requests in flight, remove the teachers, and exit"),
    ):
        actions.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=meaning
        )
    deploy.set_defaults(action="deploy")
