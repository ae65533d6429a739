"""``mopd-teacher``: serve a model as a teacher.

Arguments are parsed before any heavy import, so that ``--help`` is immediate.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar, get_args

from mopd_protocol.errors import MopdError
from mopd_server.deploy_options import DEPLOY_EXAMPLE, add_deploy_options
from mopd_server.engines.registry import AUTO, ENGINES
from mopd_server.exit_status import CRASH_STATUS, INTERRUPTED_STATUS
from mopd_server.http.logs import configure_logs
from mopd_server.options import (
    MAX_SECONDS,
    Append,
    OptionGroup,
    mebibytes,
    named_model,
    pair,
    port,
    positive,
    weights,
)
from mopd_server.process.listening import bound_socket
from mopd_server.settings import (
    DtypeName,
    GatewaySettings,
    ListenSettings,
    LogFormat,
    PoolSettings,
    TeacherSettings,
    TranslationSettings,
)
from mopd_server.translation_options import (
    TRANSLATE_EXAMPLE,
    add_gateway_options,
    add_translation_options,
)

Settings = TypeVar(
    "Settings", TeacherSettings, ListenSettings, PoolSettings, TranslationSettings, GatewaySettings
)

_EXAMPLE = """\
example: serve a local model as the teacher "math", and request its top 8 per token

  mopd-teacher serve ./Qwen3-4B --name math --port 8101

  curl http://127.0.0.1:8101/v1/logprobs -H 'Content-Type: application/json' -d '{
    "sequences": [{"messages": [{"role": "user", "content": "3 + 4 ="}],
                   "completion": "7", "finished": true}],
    "top_k": 8}'

The teacher tokenizes the text, so the student may be of any family. /docs documents the request,
/v1/manifest identifies the teacher, /readyz returns 200 once it can score.

exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the teacher cannot start, 2 for an invalid
option, 3 if its engine has crashed: restart it. The last line on stderr is the cause.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, explained on stderr unless it is 0."""
    parsed = parser().parse_args(arguments)
    if parsed.command == "deploy":
        return _deploy(parsed)
    listen, translation = _settings(ListenSettings, parsed), translation_settings_of(parsed)
    if parsed.command == "translate":
        gateway = gateway_settings_of(parsed)
        teacher = TeacherSettings(model=gateway.teacher, name=gateway.name or "teacher")
        pool = None
    else:
        gateway, pool = None, pool_settings_of(parsed)
        teacher, _ = settings_of(parsed)
        if bool(teacher.model) == bool(pool.models):
            parser().error("expected either MODEL or --models")
    configure_logs(listen.log_level, listen.log_format)
    try:
        with bound_socket(listen.host, listen.port) as bound:
            # The web framework; torch and transformers are imported once HTTP responds.
            from mopd_server.process.serving import serve

            received = serve(teacher, listen, bound, pool, translation, gateway)
    except MopdError as error:
        from mopd_server.engines.base import EngineCrashError

        sys.stderr.write(f"mopd-teacher: {error}\n")
        return CRASH_STATUS if isinstance(error, EngineCrashError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return INTERRUPTED_STATUS if received == signal.SIGINT else 0


def _deploy(parsed: argparse.Namespace) -> int:
    configure_logs(ListenSettings.log_level, ListenSettings.log_format)
    try:
        from mopd_server.ray_serve.command import run_deploy

        run_deploy(
            parsed.file,
            action=parsed.action,
            address=parsed.address,
            port=parsed.port,
            detach=parsed.detach,
        )
    except MopdError as error:
        sys.stderr.write(f"mopd-teacher: {error}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command line; every option is named as its setting (``dest``)."""
    root = argparse.ArgumentParser(
        prog="mopd-teacher",
        description="Serve a language model as a teacher: score completions with its next-token "
        "distributions.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"mopd {_version()}")
    commands = root.add_subparsers(
        dest="command", required=True, metavar="serve | deploy | translate"
    )
    serve = commands.add_parser(
        "serve",
        help="load a model and serve requests until SIGTERM",
        description="Load MODEL and serve requests until SIGTERM or Ctrl-C.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(serve)
    _add_pool_options(serve)
    _add_vllm_options(serve)
    _add_limit_options(serve)
    _add_request_options(serve)
    add_translation_options(serve, required=False)
    _add_listen_options(serve)
    serve.set_defaults(pool_resident=TeacherSettings.pool_resident)
    deploy = commands.add_parser(
        "deploy",
        help="serve the teachers of a YAML file with replicas on a Ray cluster",
        description="Serve the teachers of FILE with Ray Serve, each at http://HOST:PORT/NAME, "
        "until SIGTERM or Ctrl-C.",
        epilog=DEPLOY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_deploy_options(deploy)
    translate = commands.add_parser(
        "translate",
        help="serve the scores of a teacher at another address in the ids of a student",
        description="Serve the scores of the teacher at URL in the ids of a student with another "
        "tokenizer, until SIGTERM or Ctrl-C.",
        epilog=TRANSLATE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_gateway_options(translate)
    add_translation_options(translate, required=True)
    _add_request_options(translate)
    _add_listen_options(translate)
    return root


def _version() -> str:
    try:
        return version("mopd")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


def settings_of(parsed: argparse.Namespace) -> tuple[TeacherSettings, ListenSettings]:
    """Return the settings of a parsed ``serve`` command."""
    return _settings(TeacherSettings, parsed), _settings(ListenSettings, parsed)


def pool_settings_of(parsed: argparse.Namespace) -> PoolSettings:
    """Return the settings of a pool; without models, one teacher is served."""
    parsed.models = tuple(parsed.models)
    return _settings(PoolSettings, parsed)


def translation_settings_of(parsed: argparse.Namespace) -> TranslationSettings:
    """Return the settings of a translation; without a student, there is none."""
    return _settings(TranslationSettings, parsed)


def gateway_settings_of(parsed: argparse.Namespace) -> GatewaySettings:
    """Return the settings of a parsed ``translate`` command."""
    return _settings(GatewaySettings, parsed)


def _settings(kind: type[Settings], parsed: argparse.Namespace) -> Settings:
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)})


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    model = OptionGroup(serve, "model", TeacherSettings)
    model.group.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="model folder or hub id"
    )
    model.add("--name", "name of this teacher (default: last part of MODEL)")
    model.add(
        "--engine",
        "inference engine; auto selects the first that is installed and supports the device: vllm "
        "with an accelerator, else transformers",
        choices=(AUTO, *ENGINES),
    )
    model.add("--revision", "hub commit, branch or tag")
    model.add(
        "--adapter",
        "serve a LoRA adapter of MODEL as another teacher, at the address ending in "
        "/adapters/NAME; repeatable",
        action=Append,
        type=pair("NAME=FOLDER"),
        metavar="NAME=FOLDER",
    )
    model.add(
        "--dtype",
        "precision; auto is float32 on a CPU, else that of the checkpoint",
        choices=get_args(DtypeName),
    )
    model.add(
        "--device", "torch device such as cpu, cuda:1 or npu; auto is the accelerator, else the CPU"
    )
    model.add(
        "--trust-remote-code",
        "run Python code that comes with the model; only for models of trusted authors",
        action="store_true",
    )


def _add_pool_options(serve: argparse.ArgumentParser) -> None:
    pool = OptionGroup(serve, "several teachers", PoolSettings)
    pool.group.add_argument(
        "--models",
        nargs="+",
        default=(),
        type=named_model,
        metavar="NAME=MODEL",
        help="serve several teachers, each at /teachers/NAME, instead of MODEL (engine "
        "transformers, or --engine vllm)",
    )
    pool.add(
        "--resident",
        "teachers with their weights in memory, which they share; the others are loaded when they "
        "are needed",
        type=positive(int),
        metavar="N",
    )
    pool.add(
        "--max-wait",
        "a batch that has waited longer, and longer than four swaps take, replaces a busy teacher",
        dest="max_wait_seconds",
        type=positive(float, at_most=MAX_SECONDS),
        metavar="SECONDS",
    )


def _add_vllm_options(serve: argparse.ArgumentParser) -> None:
    vllm = OptionGroup(serve, "vLLM", TeacherSettings)
    for name, meaning in (
        ("tensor", "accelerators that share each layer"),
        ("pipeline", "groups of accelerators, each with a part of the layers"),
        ("data", "copies of the model that share the requests"),
    ):
        vllm.add(f"--{name}-parallel-size", meaning, type=positive(int), metavar="N")
    vllm.add(
        "--quantization",
        "quantize the weights on loading, such as fp8 (default: that of the checkpoint)",
        metavar="METHOD",
    )
    vllm.add(
        "--gpu-memory-utilization",
        "share of each accelerator's memory",
        type=positive(float, at_most=1),
        metavar="SHARE",
    )
    vllm.add(
        "--logits-mebibytes",
        "part of that share for the logits of one forward pass; limits its tokens",
        dest="logits_budget_bytes",
        type=mebibytes,
        metavar="MIB",
    )
    vllm.add(
        "--vllm-arg",
        "any other engine argument of vLLM, such as kv_cache_dtype=fp8 or enforce_eager=true; "
        "repeatable",
        action=Append,
        type=pair("KEY=VALUE"),
        metavar="KEY=VALUE",
    )


def _add_limit_options(serve: argparse.ArgumentParser) -> None:
    limits = OptionGroup(serve, "limits", TeacherSettings)
    for flag, metavar, meaning in (
        ("--max-model-len", "TOKENS", "maximum prompt plus completion (default: model's limit)"),
        ("--top-k-max", "K", "maximum top_k of a request"),
        ("--max-batch-tokens", "TOKENS", "tokens in one forward pass; lower if out of memory"),
        ("--max-queue-tokens", "TOKENS", "tokens in the queue; requests beyond get 429"),
    ):
        limits.add(flag, meaning, type=positive(int), metavar=metavar)
    limits.add(
        "--key-weights",
        "shares of the engine by the name of the API key, such as alice=2,bob=0.5, while several "
        "have queued requests; 1 for all others (default: equal)",
        type=weights,
        metavar="NAME=WEIGHT,...",
    )


def _add_request_options(serve: argparse.ArgumentParser) -> None:
    requests = OptionGroup(serve, "requests", ListenSettings)
    requests.add(
        "--max-body-mebibytes",
        "maximum request body",
        dest="max_body_bytes",
        type=mebibytes,
        metavar="MIB",
    )
    for flag, dest, meaning in (
        ("--request-timeout", "request_timeout_seconds", "slower requests get 504"),
        ("--body-timeout", "body_timeout_seconds", "requests with a slower body get 408"),
        (
            "--drain-timeout",
            "drain_seconds",
            "time for requests in flight after SIGTERM; the rest get 503. Set it below the time "
            "after which the supervisor kills",
        ),
        (
            "--liveness-timeout",
            "liveness_seconds",
            "/healthz returns 503 when the engine has not responded for longer, so that a "
            "supervisor restarts the teacher",
        ),
    ):
        seconds = positive(float, at_most=MAX_SECONDS)
        requests.add(flag, meaning, dest=dest, type=seconds, metavar="SECONDS")
    for flag, metavar, meaning in (
        ("--key-tokens-per-minute", "TOKENS", "prompt and completion tokens per API key"),
        ("--key-requests-in-flight", "REQUESTS", "concurrent requests per API key"),
    ):
        meaning = f"{meaning}; requests beyond get 429 (default: unlimited)"
        requests.add(flag, meaning, type=positive(int), metavar=metavar)


def _add_listen_options(serve: argparse.ArgumentParser) -> None:
    listen = OptionGroup(serve, "address", ListenSettings)
    listen.add("--host", "address to listen on; 0.0.0.0: all network interfaces")
    listen.add("--port", "0 binds any free port and prints it", type=port)
    listen.add(
        "--api-key-file",
        "require one of these keys, one per line: KEY, or NAME KEY to log the name. Reloaded on "
        "change. MOPD_API_KEYS (comma-separated) adds more (default: no key required)",
        type=Path,
        metavar="FILE",
    )
    listen.add("--tls-certificate", "serve https", type=Path, metavar="FILE")
    listen.add("--tls-key", "private key of the certificate", type=Path, metavar="FILE")
    listen.add("--log-level", "log threshold", choices=("debug", "info", "warning", "error"))
    listen.add(
        "--log-format", "json logs one object per line to stderr", choices=get_args(LogFormat)
    )


if __name__ == "__main__":
    sys.exit(main())
