"""Settings of a teacher: model, limits, address.

Plain dataclasses: ``mopd-teacher --help`` imports only the standard library.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mopd_protocol.runtime.model_revision import folder_name

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """The model, its engine, and the limits of a batch."""

    model: str
    """Model folder or hub id."""
    name: str | None = None
    """Name of the teacher in responses and logs; default: the last component of ``model``."""
    engine: str = "auto"
    """A name of ``engines.registry.ENGINES``, or auto: vLLM if installed with a usable
    accelerator, else transformers."""
    revision: str | None = None
    """Hub commit, branch or tag."""
    adapter: tuple[str, ...] = ()
    """LoRA adapters that are teachers too, ``NAME=FOLDER``, at ``/adapters/NAME``."""
    dtype: DtypeName = "auto"
    """Precision of the forward pass; auto: float32 on a CPU, else that of the checkpoint."""
    device: str = "auto"
    """Torch device; auto: the accelerator if there is one, else the CPU."""
    max_model_len: int | None = None
    """Maximum tokens of prompt plus completion; default: the limit of the model."""
    top_k_max: int = 1024
    """Maximum ``top_k`` (and candidates per token) of a request."""
    max_batch_tokens: int = 16_384
    """Tokens in one forward pass, padding included. transformers: a longer sequence runs as a
    batch of one; vLLM: sequences are chunked, and the logits budget may allow less."""
    max_queue_tokens: int = 1_048_576
    """Tokens in the queue; requests beyond the limit get 429."""
    key_weights: tuple[tuple[str, float], ...] = ()
    """Shares of the engine by the name of the API key, while several have queued requests; 1 for
    all others."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tensor_parallel_size: int = 1
    """vLLM: accelerators that share each layer."""
    pipeline_parallel_size: int = 1
    """vLLM: groups of accelerators, each with a part of the layers."""
    data_parallel_size: int = 1
    """vLLM: copies of the model that share the requests."""
    quantization: str | None = None
    """vLLM: quantization of the weights on loading; default: that of the checkpoint."""
    gpu_memory_utilization: float = 0.9
    """vLLM: share of each accelerator's memory for the engine, logits included."""
    logits_budget_bytes: int = 4 * 1024 * 1024 * 1024
    """vLLM: memory for the logits of one forward pass; limits the tokens of the pass."""
    vllm_arg: tuple[str, ...] = ()
    """vLLM: more engine arguments, ``KEY=VALUE``, in place of the service's defaults."""
    pool_resident: int = 0
    """vLLM: engines that share the memory, of a pool that sets this; 0: a single teacher."""

    @property
    def service_name(self) -> str:
        """``name``, or the last component of the model's path."""
        return self.name or folder_name(self.model)


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Several teachers in one process, of which some have their weights in memory."""

    models: tuple[tuple[str, str], ...] = ()
    """Name and model of each teacher; empty: one teacher."""
    resident: int = 1
    """Teachers with their weights in memory."""
    max_wait_seconds: float = 30.0
    """A batch that has waited longer, and longer than four swaps take, replaces a busy teacher."""


@dataclass(frozen=True, kw_only=True)
class TranslationSettings:
    """Scores in the ids of a student with another tokenizer."""

    student: str | None = None
    """Folder or hub id of the student's tokenizer and chat template; None: no translation."""
    student_revision: str | None = None
    """Hub commit, branch or tag."""
    prompts: Path | None = None
    """JSON lines with the messages of prompts that requests contain as ids."""
    student_template_arg: tuple[str, ...] = ()
    """Variables of the student's chat template, ``KEY=VALUE``."""
    teacher_template_arg: tuple[str, ...] = ()
    """Variables of the teacher's chat template, ``KEY=VALUE``."""
    teacher_top_k: int = 64
    """Teacher tokens per row from which the student's are derived."""
    extra_rounds: int = 2
    """Rounds of extra rows, each of which continues the last one's; 0: none."""
    extra_rows: int = 64
    """Maximum extra rows of one completion."""


ServiceKind = Literal["mopd", "vllm"]


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """A teacher at another address."""

    teacher: str
    """Address of the teacher's service."""
    name: str | None = None
    """Name of the teacher in responses and logs; default: that of the service."""
    teacher_kind: ServiceKind = "mopd"
    """A mopd teacher, or a stock vLLM server."""
    tokenizer: str | None = None
    """Tokenizer of a vLLM server's model; default: the name of the model."""
    teacher_key_file: Path | None = None
    """File with the API key of the teacher; default: none."""
    teacher_timeout_seconds: float = 300.0
    """For one response of the teacher."""
    teacher_wait_seconds: float = 600.0
    """For the teacher to become ready at the start."""
    max_concurrency: int = 64
    """Concurrent requests to the teacher."""
    max_queue_tokens: int = TeacherSettings.max_queue_tokens
    """Tokens in the queue; requests beyond the limit get 429."""


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Address, authentication, and limits of a request."""

    host: str = "127.0.0.1"
    port: int = 8101
    """0: any free port."""
    api_key_file: Path | None = None
    """One key per line, ``KEY`` or ``NAME KEY``, reloaded on change; the environment variable
    MOPD_API_KEYS adds comma-separated keys."""
    key_tokens_per_minute: int | None = None
    """Prompt and completion tokens per key and minute; requests beyond get 429."""
    key_requests_in_flight: int | None = None
    """Concurrent requests per key; requests beyond get 429."""
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_seconds: float = 60.0
    """From the request's headers to the end of its body; a slower body gets 408."""
    request_timeout_seconds: float = 600.0
    drain_seconds: float = 25.0
    """Time for requests in flight after SIGTERM; the rest get 503. Supervisors often wait 30."""
    liveness_seconds: float = 300.0
    """``/healthz`` returns 503 when the engine has not responded for longer."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
