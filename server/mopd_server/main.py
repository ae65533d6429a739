"""``mopd-teacher``: serve a model as a teacher.

Arguments are parsed before any heavy import, so that ``--help`` is immediate.
"""

import argparse
import math
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, get_args

from mopd_protocol.errors import MopdError
from mopd_server.engines.registry import AUTO, ENGINES
from mopd_server.exit_status import CRASH_STATUS, INTERRUPTED_STATUS
from mopd_server.http.logs import configure_logs
from mopd_server.process.listening import bound_socket
from mopd_server.settings import (
    DtypeName,
    ListenSettings,
    LogFormat,
    PoolSettings,
    TeacherSettings,
)

Number = TypeVar("Number", int, float)
Settings = TypeVar("Settings", TeacherSettings, ListenSettings, PoolSettings)

#: One year: the system's clocks accept no infinite timeouts.
_MAX_SECONDS = 31_536_000

_MEBIBYTE = 1024 * 1024
_MAX_WEIGHT = 1000

#: Name of a teacher of a pool, a part of its address.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")

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
    teacher, listen = settings_of(parsed)
    pool = pool_settings_of(parsed)
    if bool(teacher.model) == bool(pool.models):
        parser().error("expected either MODEL or --models")
    configure_logs(listen.log_level, listen.log_format)
    try:
        with bound_socket(listen.host, listen.port) as bound:
            # The web framework; torch and transformers are imported once HTTP responds.
            from mopd_server.process.serving import serve

            received = serve(teacher, listen, bound, pool)
    except MopdError as error:
        from mopd_server.engines.base import EngineCrashError

        sys.stderr.write(f"mopd-teacher: {error}\n")
        return CRASH_STATUS if isinstance(error, EngineCrashError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return INTERRUPTED_STATUS if received == signal.SIGINT else 0


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
    commands = root.add_subparsers(dest="command", required=True, metavar="serve")
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
    _add_listen_options(serve)
    serve.set_defaults(pool_resident=TeacherSettings.pool_resident)
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


def _settings(kind: type[Settings], parsed: argparse.Namespace) -> Settings:
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)})


class _Group:
    """A group of options with the defaults of a settings class."""

    def __init__(self, parent: argparse.ArgumentParser, title: str, defaults: type[Any]) -> None:
        self.group = parent.add_argument_group(title)
        self._defaults = defaults

    def add(self, flag: str, meaning: str, dest: str = "", **options: Any) -> None:
        """Add an option; its default, if any, is appended to ``meaning``."""
        dest = dest or flag.removeprefix("--").replace("-", "_")
        default = getattr(self._defaults, dest)
        if options.get("type") is _mebibytes:
            default = str(default // _MEBIBYTE)  # parsed by argparse
        if default is not None and not isinstance(default, bool | tuple):
            shown = "%(default)g" if isinstance(default, float) else "%(default)s"
            meaning = f"{meaning} (default: {shown})"
        self.group.add_argument(flag, dest=dest, default=default, help=meaning, **options)


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    model = _Group(serve, "model", TeacherSettings)
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
        action=_Append,
        type=_pair("NAME=FOLDER"),
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
    pool = _Group(serve, "several teachers", PoolSettings)
    pool.group.add_argument(
        "--models",
        nargs="+",
        default=(),
        type=_named_model,
        metavar="NAME=MODEL",
        help="serve several teachers, each at /teachers/NAME, instead of MODEL (engine "
        "transformers, or --engine vllm)",
    )
    pool.add(
        "--resident",
        "teachers with their weights in memory, which they share; the others are loaded when they "
        "are needed",
        type=_positive(int),
        metavar="N",
    )
    pool.add(
        "--max-wait",
        "a batch that has waited longer, and longer than four swaps take, replaces a busy teacher",
        dest="max_wait_seconds",
        type=_positive(float, at_most=_MAX_SECONDS),
        metavar="SECONDS",
    )


def _add_vllm_options(serve: argparse.ArgumentParser) -> None:
    vllm = _Group(serve, "vLLM", TeacherSettings)
    for name, meaning in (
        ("tensor", "accelerators that share each layer"),
        ("pipeline", "groups of accelerators, each with a part of the layers"),
        ("data", "copies of the model that share the requests"),
    ):
        vllm.add(f"--{name}-parallel-size", meaning, type=_positive(int), metavar="N")
    vllm.add(
        "--quantization",
        "quantize the weights on loading, such as fp8 (default: that of the checkpoint)",
        metavar="METHOD",
    )
    vllm.add(
        "--gpu-memory-utilization",
        "share of each accelerator's memory",
        type=_positive(float, at_most=1),
        metavar="SHARE",
    )
    vllm.add(
        "--logits-mebibytes",
        "part of that share for the logits of one forward pass; limits its tokens",
        dest="logits_budget_bytes",
        type=_mebibytes,
        metavar="MIB",
    )
    vllm.add(
        "--vllm-arg",
        "any other engine argument of vLLM, such as kv_cache_dtype=fp8 or enforce_eager=true; "
        "repeatable",
        action=_Append,
        type=_pair("KEY=VALUE"),
        metavar="KEY=VALUE",
    )


def _add_limit_options(serve: argparse.ArgumentParser) -> None:
    limits = _Group(serve, "limits", TeacherSettings)
    for flag, metavar, meaning in (
        ("--max-model-len", "TOKENS", "maximum prompt plus completion (default: model's limit)"),
        ("--top-k-max", "K", "maximum top_k of a request"),
        ("--max-batch-tokens", "TOKENS", "tokens in one forward pass; lower if out of memory"),
        ("--max-queue-tokens", "TOKENS", "tokens in the queue; requests beyond get 429"),
    ):
        limits.add(flag, meaning, type=_positive(int), metavar=metavar)
    limits.add(
        "--key-weights",
        "shares of the engine by the name of the API key, such as alice=2,bob=0.5, while several "
        "have queued requests; 1 for all others (default: equal)",
        type=_weights,
        metavar="NAME=WEIGHT,...",
    )
    requests = _Group(serve, "requests", ListenSettings)
    requests.add(
        "--max-body-mebibytes",
        "maximum request body",
        dest="max_body_bytes",
        type=_mebibytes,
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
        seconds = _positive(float, at_most=_MAX_SECONDS)
        requests.add(flag, meaning, dest=dest, type=seconds, metavar="SECONDS")
    for flag, metavar, meaning in (
        ("--key-tokens-per-minute", "TOKENS", "prompt and completion tokens per API key"),
        ("--key-requests-in-flight", "REQUESTS", "concurrent requests per API key"),
    ):
        meaning = f"{meaning}; requests beyond get 429 (default: unlimited)"
        requests.add(flag, meaning, type=_positive(int), metavar=metavar)


def _add_listen_options(serve: argparse.ArgumentParser) -> None:
    listen = _Group(serve, "address", ListenSettings)
    listen.add("--host", "address to listen on; 0.0.0.0: all network interfaces")
    listen.add("--port", "0 binds any free port and prints it", type=_port)
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


class _Append(argparse.Action):
    """Collect the values of a repeated option in a tuple."""

    def __call__(
        self, _: object, namespace: argparse.Namespace, value: object, __: str | None = None
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), value))


def _pair(form: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {form}")
        return text

    return parse


def _named_model(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (_NAME.fullmatch(name) and model):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected NAME=MODEL, the name of letters, digits, '_', '.' and '-'"
        )
    return name, model


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    weights: list[tuple[str, float]] = []
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            weights.append((name.strip(), _positive(float, at_most=_MAX_WEIGHT)(number)))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(
                f"found {part!r}, expected NAME=WEIGHT with a number above 0, up to {_MAX_WEIGHT}"
            ) from error
    return tuple(weights)


def _positive(
    kind: Callable[[str], Number], at_most: float = math.inf, factor: int = 1
) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        number = kind(text)
        if not 0 < number <= at_most:
            limit = "" if at_most == math.inf else f", up to {at_most}"
            raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0{limit}")
        return number * factor

    parse.__name__ = "number"  # shown in argparse's own message
    return parse


_mebibytes = _positive(int, factor=_MEBIBYTE)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
