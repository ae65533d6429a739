"""What a teacher is started with: the model and its limits, and where it listens.

Plain dataclasses, so that ``mopd-teacher --help`` needs nothing heavier than the standard library.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mopd_protocol.runtime.model_revision import folder_name

EngineName = Literal["auto", "vllm", "transformers"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Which model answers, and how much it takes at once."""

    model: str
    """Model folder or hub id."""
    name: str | None = None
    """Name of this teacher in answers and logs; the model's last path component when absent."""
    engine: EngineName = "auto"
    """auto is vLLM where it is installed beside an accelerator that it can use."""
    revision: str | None = None
    """Hub commit, branch or tag."""
    dtype: DtypeName = "auto"
    """Precision of the forward pass; auto is float32 on CPU and the model's own elsewhere."""
    device: str = "auto"
    """A torch device; auto is the accelerator where there is one, else the CPU."""
    max_model_len: int | None = None
    """Longest prompt plus completion in tokens; the model's own limit when absent."""
    top_k_max: int = 1024
    """Largest top_k (and candidates per token) that a request may ask for."""
    max_batch_tokens: int = 16_384
    """Tokens in one forward pass, padding counted. transformers: a longer single sequence goes
    alone; vLLM: sequences are cut where a pass is full, and the logits budget may allow less."""
    max_queue_tokens: int = 1_048_576
    """Tokens that may wait before requests are answered with 429."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tensor_parallel_size: int = 1
    """vLLM: accelerators that share each layer."""
    pipeline_parallel_size: int = 1
    """vLLM: groups of accelerators that hold one part of the layers each."""
    data_parallel_size: int = 1
    """vLLM: copies of the model that share the requests."""
    quantization: str | None = None
    """vLLM: how weights are quantized on loading; what the checkpoint says when absent."""
    gpu_memory_utilization: float = 0.9
    """vLLM: share of each accelerator's memory that the engine may take, logits and all."""
    logits_budget_bytes: int = 4 * 1024 * 1024 * 1024
    """vLLM: memory for the logits of one forward pass, which bounds its tokens."""

    @property
    def service_name(self) -> str:
        """The name given, else the last component of the model's path."""
        return self.name or folder_name(self.model)


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Where the service listens, whom it lets in, and how large and slow a request may be."""

    host: str = "127.0.0.1"
    port: int = 8101
    """0 takes a free port."""
    api_key_file: Path | None = None
    """One key a line, ``KEY`` or ``NAME KEY``, read again when it changes; the environment variable
    MOPD_API_KEYS adds comma-separated keys."""
    key_tokens_per_minute: int | None = None
    """Prompt and completion tokens that each key may ask for; more gets 429."""
    key_requests_in_flight: int | None = None
    """Requests that each key may have under way at once; more get 429."""
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_seconds: float = 60.0
    """From a request's head to the end of its body; a slower one gets 408."""
    request_timeout_seconds: float = 600.0
    drain_seconds: float = 25.0
    """After SIGTERM, for requests in flight; those left get 503. Supervisors often wait 30."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
