"""Engine arguments of the command line: ``KEY=VALUE``, parsed by vLLM's own parser."""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false

from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mopd_protocol.errors import ConfigError

#: Arguments that the service sets -> its own option; None where there is none.
OWN_OPTIONS: dict[str, str | None] = {
    "model": "MODEL",
    "revision": "--revision",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "trust_remote_code": "--trust-remote-code",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-batch-tokens",
    "max_logprobs": "--top-k-max",
    "enable_lora": "--adapter",
    "skip_tokenizer_init": None,
    "generation_config": None,
    "worker_extension_cls": None,
    "scheduler_cls": None,
}


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        problem = " ".join(message.split())
        raise ConfigError(
            f"--vllm-arg: invalid engine argument: {problem} (expected KEY=VALUE as listed by "
            "vllm serve --help=all)",
            key="vllm_arg",
        )


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``AsyncEngineArgs``, with the types of vLLM's command line.

    A key is spelled with ``-`` or ``_``; ``KEY.FIELD`` sets a field of a JSON argument; the value
    of a flag is ``true`` or ``false``.

    Raises:
        ConfigError: if a key is unknown to vLLM or set by the service, or its value is invalid.
    """
    words: list[str] = []
    names: list[str] = []
    for pair in pairs:
        key, _, value = pair.partition("=")
        name = key.split(".")[0].replace("-", "_")
        if name in OWN_OPTIONS:
            option = OWN_OPTIONS[name]
            fix = "Remove it." if option is None else f"Use {option}."
            raise ConfigError(
                f"--vllm-arg: {name} is set by the teacher service (found {pair!r}). {fix}",
                key="vllm_arg",
            )
        names.append(name)
        flag = f"--{key.replace('_', '-')}"
        if value.lower() == "true":
            words.append(flag)
        elif value.lower() == "false":
            words.append(f"--no-{flag.removeprefix('--')}")
        else:
            words.append(f"{flag}={value}")
    parser = _Parser(prog="mopd-teacher", add_help=False, allow_abbrev=False)
    parsed = AsyncEngineArgs.add_cli_args(parser).parse_args(words)
    return {name: getattr(parsed, name) for name in names}
