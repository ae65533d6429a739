"""``mopd-teacher``: serves a model as a teacher.

Arguments are parsed before anything heavy is imported, so that ``--help`` answers at once.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from mopd_protocol.errors import MopdError
from mopd_server.http.logs import configure_logs
from mopd_server.settings import (
    DtypeName,
    EngineName,
    ListenSettings,
    LogFormat,
    TeacherSettings,
)

Number = TypeVar("Number", int, float)

#: Exit status after Ctrl-C, as shells count it.
_INTERRUPTED = 130

#: A year: the system's clocks take no infinite times, and say so only where one is waited for.
_LONGEST_SECONDS = 31_536_000

_EXAMPLE = """\
example: serve a local model as the teacher "math" and ask it for its top 8 per token

  mopd-teacher serve ./Qwen3-4B --name math --port 8101

  curl http://127.0.0.1:8101/v1/logprobs -H 'Content-Type: application/json' -d '{
    "sequences": [{"messages": [{"role": "user", "content": "3 + 4 ="}],
                   "completion": "7", "finished": true}],
    "top_k": 8}'

The teacher tokenizes the text itself, so the student may be of any family. /docs explains the
request, /v1/manifest says who the teacher is, /readyz answers 200 once it can score.

exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 when the teacher cannot start, 2 for a wrong
option, 3 when its engine died: restart it. The last line on stderr says why.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status, explained by one sentence unless it is 0."""
    parsed = parser().parse_args(arguments)
    teacher, listen = settings_of(parsed)
    configure_logs(listen.log_level, listen.log_format)
    # torch, transformers and the web framework
    from mopd_server.process.serving import DIED_STATUS, TeacherDied, serve

    try:
        ended_by = serve(teacher, listen)
    except TeacherDied as error:
        sys.stderr.write(f"mopd-teacher: {error}\n")
        return DIED_STATUS
    except MopdError as error:
        sys.stderr.write(f"mopd-teacher: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _INTERRUPTED if ended_by == signal.SIGINT else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="mopd-teacher",
        description="Serves a language model as a teacher: it reads what a student wrote and "
        "answers with what it would have said, token by token.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="serve")
    serve = commands.add_parser(
        "serve",
        help="load a model and answer requests until SIGTERM",
        description="Loads MODEL and answers requests until SIGTERM or Ctrl-C.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_options(serve)
    _add_vllm_options(serve)
    _add_limit_options(serve)
    _add_listen_options(serve)
    return root


def settings_of(parsed: argparse.Namespace) -> tuple[TeacherSettings, ListenSettings]:
    """The settings that a parsed ``serve`` command asks for."""
    teacher = TeacherSettings(
        model=parsed.model,
        name=parsed.name,
        engine=parsed.engine,
        revision=parsed.revision,
        dtype=parsed.dtype,
        device=parsed.device,
        max_model_len=parsed.max_model_len,
        top_k_max=parsed.top_k_max,
        max_batch_tokens=parsed.max_batch_tokens,
        max_queue_tokens=parsed.max_queue_tokens,
        trust_remote_code=parsed.trust_remote_code,
        tensor_parallel_size=parsed.tensor_parallel_size,
        pipeline_parallel_size=parsed.pipeline_parallel_size,
        data_parallel_size=parsed.data_parallel_size,
        quantization=parsed.quantization,
        gpu_memory_utilization=parsed.gpu_memory_utilization,
        logits_budget_bytes=parsed.logits_mebibytes * 1024 * 1024,
    )
    listen = ListenSettings(
        host=parsed.host,
        port=parsed.port,
        api_key_file=parsed.api_key_file,
        max_body_bytes=parsed.max_body_mebibytes * 1024 * 1024,
        body_timeout_seconds=parsed.body_timeout,
        request_timeout_seconds=parsed.request_timeout,
        drain_seconds=parsed.drain_timeout,
        key_tokens_per_minute=parsed.key_tokens_per_minute,
        key_requests_in_flight=parsed.key_requests_in_flight,
        tls_certificate=parsed.tls_certificate,
        tls_key=parsed.tls_key,
        log_level=parsed.log_level,
        log_format=parsed.log_format,
    )
    return teacher, listen


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    model = serve.add_argument_group("the model")
    model.add_argument("model", metavar="MODEL", help="model folder or hub id")
    model.add_argument("--name", help="name of this teacher (default: last part of MODEL)")
    model.add_argument(
        "--engine",
        choices=get_args(EngineName),
        default=TeacherSettings.engine,
        help="what runs the model; auto takes vllm where it is installed beside an accelerator, "
        "else transformers (default: %(default)s)",
    )
    model.add_argument("--revision", help="hub commit, branch or tag")
    model.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default=TeacherSettings.dtype,
        help="precision; auto is float32 on CPU, the model's own elsewhere (default: %(default)s)",
    )
    model.add_argument(
        "--device",
        default=TeacherSettings.device,
        help="torch device such as cpu, cuda:1 or npu; auto is the accelerator where there is one "
        "(default: %(default)s)",
    )
    model.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model; only for models whose authors you trust",
    )


def _add_vllm_options(serve: argparse.ArgumentParser) -> None:
    vllm = serve.add_argument_group("vLLM")
    for name, meaning in (
        ("tensor", "accelerators that share each layer"),
        ("pipeline", "groups of accelerators that hold a part of the layers each"),
        ("data", "copies of the model that share the requests"),
    ):
        vllm.add_argument(
            f"--{name}-parallel-size",
            type=_positive(int),
            default=1,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    vllm.add_argument(
        "--quantization",
        metavar="METHOD",
        help="quantize the weights on loading, such as fp8 (default: what the checkpoint says)",
    )
    vllm.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=TeacherSettings.gpu_memory_utilization,
        metavar="SHARE",
        help="share of each accelerator's memory to take (default: %(default)s)",
    )
    vllm.add_argument(
        "--logits-mebibytes",
        type=_positive(int),
        default=TeacherSettings.logits_budget_bytes // (1024 * 1024),
        metavar="MIB",
        help="of that, for the logits of one forward pass; bounds its tokens "
        "(default: %(default)s)",
    )


def _add_limit_options(serve: argparse.ArgumentParser) -> None:
    limits = serve.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len",
        type=_positive(int),
        metavar="TOKENS",
        help="longest prompt plus completion (default: the model's own limit)",
    )
    limits.add_argument(
        "--top-k-max",
        type=_positive(int),
        default=TeacherSettings.top_k_max,
        metavar="K",
        help="largest top_k that a request may ask for (default: %(default)s)",
    )
    limits.add_argument(
        "--max-batch-tokens",
        type=_positive(int),
        default=TeacherSettings.max_batch_tokens,
        metavar="TOKENS",
        help="tokens in one forward pass; lower it when memory is short (default: %(default)s)",
    )
    limits.add_argument(
        "--max-queue-tokens",
        type=_positive(int),
        default=TeacherSettings.max_queue_tokens,
        metavar="TOKENS",
        help="tokens that may wait before requests get 429 (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body-mebibytes",
        type=_positive(int),
        default=ListenSettings.max_body_bytes // (1024 * 1024),
        metavar="MIB",
        help="largest request body (default: %(default)s)",
    )
    limits.add_argument(
        "--request-timeout",
        type=_positive(float, at_most=_LONGEST_SECONDS),
        default=ListenSettings.request_timeout_seconds,
        metavar="SECONDS",
        help="a request that takes longer gets 504 (default: %(default)g)",
    )
    limits.add_argument(
        "--body-timeout",
        type=_positive(float, at_most=_LONGEST_SECONDS),
        default=ListenSettings.body_timeout_seconds,
        metavar="SECONDS",
        help="a request whose body takes longer to arrive gets 408 (default: %(default)g)",
    )
    limits.add_argument(
        "--drain-timeout",
        type=_positive(float, at_most=_LONGEST_SECONDS),
        default=ListenSettings.drain_seconds,
        metavar="SECONDS",
        help="after SIGTERM, requests in flight have so long; the rest get 503. Keep it below the "
        "time after which your supervisor kills (default: %(default)g)",
    )
    limits.add_argument(
        "--key-tokens-per-minute",
        type=_positive(int),
        metavar="TOKENS",
        help="prompt and completion tokens that each API key may ask for; more gets 429 "
        "(default: no limit)",
    )
    limits.add_argument(
        "--key-requests-in-flight",
        type=_positive(int),
        metavar="REQUESTS",
        help="requests that each API key may have under way; more get 429 (default: no limit)",
    )


def _add_listen_options(serve: argparse.ArgumentParser) -> None:
    listen = serve.add_argument_group("the address")
    listen.add_argument(
        "--host",
        default=ListenSettings.host,
        help="address to listen on; 0.0.0.0 opens it to the network (default: %(default)s)",
    )
    listen.add_argument(
        "--port",
        type=_port,
        default=ListenSettings.port,
        help="0 takes a free port and prints it (default: %(default)s)",
    )
    listen.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="ask for one of these keys, one a line: KEY, or NAME KEY to see the name in the log. "
        "Read again when it changes. MOPD_API_KEYS (comma-separated) adds more "
        "(default: no key asked)",
    )
    listen.add_argument("--tls-certificate", type=Path, metavar="FILE", help="serve https")
    listen.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    listen.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=ListenSettings.log_level,
        help="(default: %(default)s)",
    )
    listen.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default=ListenSettings.log_format,
        help="json writes one object a line, on stderr like text (default: %(default)s)",
    )


def _positive(kind: Callable[[str], Number], at_most: float = math.inf) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        number = kind(text)
        if not 0 < number <= at_most:
            limit = "" if at_most == math.inf else f", up to {at_most}"
            raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0{limit}")
        return number

    parse.__name__ = "number"  # argparse names the type in its own message
    return parse


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0, up to 1")
    return float(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
