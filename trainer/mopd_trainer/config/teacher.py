"""``TeacherConfig``: one teacher of a run; ``ScoreCacheConfig``: stored scores of all teachers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mopd_client.services.kinds import SERVICE_KINDS, ServiceKind
from mopd_losses.config import (
    AutoConfig,
    CtkdConfig,
    LossConfig,
    PolicyGradientConfig,
    PrefixKlConfig,
    TopKKlConfig,
)
from mopd_protocol.requests import ChatTemplateKwargs, LogprobsDtype
from mopd_trainer.config.settings import Incidental, Settings, invalid

#: Losses that compare distributions at any two temperatures.
_SOFTENED = (AutoConfig, TopKKlConfig, CtkdConfig, PrefixKlConfig)
#: Losses of earlier versions, which ``bench.numerals`` compares.
_REMOVED_LOSSES = ("pkl_parity", "hkl")
_FALLBACK = "fallback:"
#: Settings of a teacher's own prompt.
PROMPT_SETTINGS = ("system_prompt", "prompt_key", "append_key")
#: URL of a teacher that the run will start.
_NOT_STARTED = "http://not-started-yet"
#: URL of a teacher in the trainer's process.
_IN_THIS_PROCESS = "http://in-this-process"
#: URL of a teacher whose scores are stored.
_STORED = "http://stored-scores"


class ServeConfig(Settings):
    """A ``mopd-teacher serve`` process that the run starts."""

    model: str
    """Model folder or hub name, on the machine of the service."""
    devices: int = Field(default=1, ge=1)
    """Devices of the service."""
    shares_with: str | None = None
    """Name of a teacher that runs on the same devices; shared devices are counted once."""
    arguments: tuple[str, ...] = ()
    """More arguments of ``mopd-teacher serve``, for instance ``[--engine, vllm]``."""


class TeacherConfig(Settings):
    """A teacher: address, requests and loss.

    Rejected: a stock vLLM server without ``tokenizer`` or with unsupported settings, and settings
    of one kind for another kind; a local teacher without ``model`` or with settings of a service;
    ``support: student_topk`` with a loss that needs other rows; and ``support: full`` for a service
    or a loss other than ``topk_kl``.
    """

    url: Incidental[tuple[str, ...]] = Field(min_length=1)
    """URL of the service, or a list of the URLs of its replicas. ``dns+http://name:port`` is one
    replica at each address of a name, as of a headless Kubernetes Service: addresses are resolved
    again during the run, and replicas with another manifest are not used. A path is kept
    (``http://host:8000/math``, as of Ray Serve)."""
    placement: Incidental[Literal["url", "ray", "local", "stored"]] = "url"
    """``url``: a running service. ``ray``: a service that the run starts with ``serve``, restarts
    after a crash, and stops at the end. ``local``: ``model`` in the trainer's process, with a copy
    on each rank; it is offloaded to the CPU during sampling and training, and loaded on ``device``
    for scoring, one local teacher at a time; needs ``rollout.scoring: after_rollout``. ``stored``:
    no teacher; its scores of the reference answers are read from ``scores``."""
    scores: Incidental[Path | None] = None
    """Folder of ``mopd score``, for ``placement: stored``, which it implies. A ``url`` is then not
    contacted."""
    serve: Incidental[ServeConfig | None] = None
    """The service to start, for ``placement: ray``."""
    kind: Literal["mopd", "openai", "self"] = "mopd"
    """``mopd``: a ``mopd-teacher serve``; ``openai``: a stock ``vllm serve`` (start it with
    ``--max-logprobs`` of at least ``top_k``; for ``support: student_topk``, ``top_k`` + 1, and with
    ``--enable-scale-out``); ``self``: the student, in the trainer's process, with ``weights``
    (``placement: local``, and ``rollout.scoring: after_rollout`` by default)."""
    weights: Literal["start", "live", "average", "copy"] | None = None
    """``self``: ``start``: the weights before the first step, the default; ``live``: those of the
    step, without a gradient; ``average``: an exponential moving average; ``copy``: a copy that is
    taken every few steps. All but ``live`` take the memory of the trained weights once more."""
    rate: float | None = Field(default=None, gt=0, le=1)
    """``weights: average``: share of the student's weights in the average of each step. Default:
    0.01."""
    every: int | None = Field(default=None, ge=1)
    """``weights: copy``: steps between two copies."""
    tokenizer: Incidental[str | None] = None
    """``openai``: folder or hub name of the served model's tokenizer."""
    model: Incidental[str | None] = None
    """``openai``: name of the model, if the server has several. ``local``: model folder or hub
    name. ``mopd``: name of the model that the service must have; any, if not set."""
    revision: Incidental[str | None] = None
    """``openai``: a name for the served weights, which the server does not report; it identifies
    the teacher on resume and in the score cache. ``local``: commit, branch or tag of the hub.
    ``mopd``: beginning of the revision that the service must report."""
    device: Incidental[str | None] = None
    """``local``: device for scoring. Default: the student's device."""
    dtype: Incidental[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """``local``: precision of the forward pass; ``auto`` is float32 on a CPU and the model's dtype
    on other devices, as in a service."""
    require_all_replicas: Incidental[bool] = False
    """Wait for all replicas of a list of URLs before the run starts, which detects wrong URLs; if
    ``false``, wait for one replica, warn, and use the others once they are ready."""
    top_k: int = Field(default=64, ge=1)
    """Number of ids with logprobs for each token."""
    support: Literal["teacher_topk", "student_topk", "full"] = "teacher_topk"
    """Ids on which the distributions are compared. ``teacher_topk``: the teacher's top-k.
    ``student_topk``: the student's ``top_k`` ids at each token (mapped to the teacher's tokenizer),
    which a reverse divergence needs to cover the student's mass. ``full``: all ids, for ``topk_kl``
    with a ``local`` teacher; its hidden states are stored, and its head stays on the student's
    device, where logits are computed in blocks."""
    control: Literal["shuffled", "random", "constant_negative"] | None = None
    """Control arm: the same budget with a teacher that has nothing to teach. ``shuffled``: each
    completion is scored after another prompt of this teacher. ``random``: each row keeps its
    probabilities, on ids drawn at random for every completion. ``constant_negative``: the scores
    are requested and ignored; a policy gradient gives an advantage of -1 nat to each sampled token
    that had a probability below 0.5, and 0 to the others."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of this teacher's loss."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of both distributions in the loss; values other than 1 need an engine
    that supports them (see the teacher's manifest)."""
    teacher_temperature: float | None = Field(default=None, gt=0)
    """Softmax temperature of the teacher's distribution, if it differs from the student's: below 1,
    the student learns a sharper distribution than the teacher's. Default: ``temperature``."""
    chat_template_kwargs: ChatTemplateKwargs = Field(default_factory=dict)
    """Variables of the teacher's chat template (``{enable_thinking: false}``)."""
    system_prompt: str | None = None
    """System message of this teacher, instead of the student's or before its messages. The student
    does not see it. Lines of the data may have other messages for teachers: ``teacher_messages``, a
    list for all teachers of the line, or a mapping of names to lists."""
    prompt_key: str | None = None
    """Key of the messages, or of the user message, that this teacher sees in place of the
    student's."""
    append_key: str | None = None
    """Key of a text that is appended to the last user message of this teacher behind a blank line,
    for instance the reference answer."""
    loss: LossConfig = AutoConfig()
    """Loss between student and teacher; a name is short for ``{type: NAME}``. ``auto`` selects by
    the tokenizers; ``mopd check`` prints the selection."""
    logprobs_dtype: LogprobsDtype = "float32"
    """Precision of logprobs in responses."""
    api_key_env: Incidental[str | None] = None
    """Environment variable with this teacher's API key."""
    ca_file: Incidental[Path | None] = None
    """PEM file with the certificate authorities of an https address, instead of the public ones."""
    timeout_seconds: Incidental[float] = Field(default=300.0, gt=0)
    """Timeout of one attempt, time in the teacher's queue included, in which all requests of a step
    may wait."""
    deadline_seconds: Incidental[float] = Field(default=1200.0, gt=0)
    """Timeout of a request, including all retries."""
    max_concurrency: Incidental[int] = Field(default=32, ge=1)
    """Maximum number of concurrent requests; further requests are queued."""
    verify: Incidental[float] = Field(default=0.001, ge=0, le=1)
    """Largest share of the tokens that is scored again, in requests that only the teacher's true
    distributions agree with. The first response of each replica is always verified, unless this is
    0. A contradiction ends the run for every ``on_error``. ``local`` teachers and stored scores
    are not verified."""
    on_error: Incidental[str] = "fail"
    """If the teacher stays unavailable: ``fail`` ends the run; ``wait`` retries until the teacher
    is back; ``drop`` drops the samples; ``fallback:<teacher>`` scores the samples with another
    teacher of the run, with all settings of that teacher (loss, weight, top_k), at this teacher's
    weight of the sample. Samples that the teacher rejects are dropped or passed on as well, but end
    the run for ``fail`` and ``wait``; a sample that is too long never ends the run. All are
    counted."""

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("loss"), str):
            values = {**values, "loss": {"type": values["loss"]}}
        loss: object = values.get("loss")
        if isinstance(loss, dict) and loss.get("type") in _REMOVED_LOSSES:
            raise invalid(
                "loss.type",
                f"X-Token's published losses are no longer available (found {loss['type']!r}). "
                "Use 'auto', or 'ctkd' with span_rows 'pooled' for P-KL without its faults.",
            )
        if values.get("kind") == "self":
            values = {"placement": "local", "weights": "start", **values}
            if values["weights"] == "average":
                values = {"rate": 0.01, **values}
        if values.get("scores") is not None:
            values = {"placement": "stored", **values}
        placements = {"ray": _NOT_STARTED, "local": _IN_THIS_PROCESS, "stored": _STORED}
        placeholder = placements.get(str(values.get("placement")))
        if placeholder is not None:
            values = {"url": [placeholder], **values}
        if isinstance(values.get("url"), str):
            return {**values, "url": [values["url"]]}
        return values

    @model_validator(mode="after")
    def _validate_on_error(self) -> "TeacherConfig":
        policy = self.on_error
        if policy in ("fail", "drop", "wait") or policy.removeprefix(_FALLBACK) not in ("", policy):
            return self
        raise invalid(
            "on_error",
            f"unknown policy (found {policy!r}, expected fail, drop, wait or fallback:<teacher>)",
        )

    @model_validator(mode="after")
    def _validate_placement(self) -> "TeacherConfig":
        if (self.placement == "ray") != (self.serve is not None):
            raise invalid(
                "serve",
                f"must be set if and only if placement is 'ray' (found placement "
                f"{self.placement!r}, serve {'not set' if self.serve is None else 'set'})",
            )
        if (self.placement == "stored") != (self.scores is not None):
            raise invalid(
                "scores",
                f"must be set if and only if placement is 'stored' (found placement "
                f"{self.placement!r}, scores {'not set' if self.scores is None else 'set'})",
            )
        if self.placement == "stored" and self.control is not None:
            raise invalid(
                "control",
                f"not available with stored scores, which are of the data's own prompts (found "
                f"{self.control!r}). Remove it, or use a running teacher.",
            )
        own = self.kind == "self" and isinstance(self.loss, AutoConfig)  # which selects topk_kl
        full = self.local and (own or isinstance(self.loss, TopKKlConfig))
        if self.support == "full" and not full:
            raise invalid(
                "support",
                "'full' needs a 'local' teacher with the student's tokenizer and loss 'topk_kl' "
                f"(found placement {self.placement!r}, loss '{self.loss.type}')",
            )
        return self

    @model_validator(mode="after")
    def _validate_control(self) -> "TeacherConfig":
        if self.control in ("random", "constant_negative") and self.support == "full":
            raise invalid(
                "control",
                f"not available with support 'full' (found {self.control!r}). Use 'shuffled', or "
                "support 'teacher_topk'.",
            )
        return self

    @model_validator(mode="after")
    def _validate_self(self) -> "TeacherConfig":
        for name, used in (
            ("weights", self.kind == "self"),
            ("rate", self.weights == "average"),
            ("every", self.weights == "copy"),
        ):
            if used != (getattr(self, name) is not None):
                raise invalid(
                    name,
                    f"{'required' if used else 'not available'} for kind {self.kind!r} with "
                    f"weights {self.weights!r} (found {getattr(self, name)!r})",
                )
        if self.kind == "self" and not self.local:
            raise invalid(
                "placement",
                f"a teacher of kind 'self' is 'local' (found {self.placement!r}). Remove it.",
            )
        return self

    @model_validator(mode="after")
    def _validate_local(self) -> "TeacherConfig":
        if not self.local:
            set_names = [name for name in ("device", "dtype") if name in self.model_fields_set]
            if set_names and (self.device is not None or self.dtype != "auto"):
                raise invalid(
                    set_names[0],
                    f"{' and '.join(set_names)} can only be set for placement 'local' (found "
                    f"placement {self.placement!r}). Set it for the service, or use placement "
                    "'local'.",
                )
            return self
        if self.model is None and self.kind != "self":
            raise invalid(
                "model", "required for placement 'local'. Set it to a model folder or hub name."
            )
        names = [
            name
            for name in ("tokenizer", "api_key_env", "ca_file")
            if getattr(self, name) is not None
        ]
        names += ["kind"] if self.kind == "openai" else []
        names += ["url"] if self.url != (_IN_THIS_PROCESS,) else []
        if names:
            raise invalid(
                names[0],
                f"{' and '.join(names)} cannot be set for placement 'local', which uses no HTTP. "
                "Remove it, or set placement to 'url'.",
            )
        return self

    @model_validator(mode="after")
    def _validate_kind(self) -> "TeacherConfig":
        service = self.service
        if service and service.describes_itself and self.tokenizer is not None:
            raise invalid(
                "tokenizer",
                f"a {service.title} sends its tokenizer. Remove it, or set kind to 'openai'.",
            )
        if service and not service.describes_itself and self.tokenizer is None:
            raise invalid(
                "tokenizer",
                f"required for kind {self.kind!r}. Set it to the folder or hub name of the served "
                "model.",
            )
        if service and not service.any_temperature and self.scored_temperature != 1.0:
            raise invalid(
                "temperature",
                f"a {service.title} returns logprobs at temperature 1 only (found "
                f"{self.scored_temperature:g}). Set it to 1, or serve the model with mopd-teacher.",
            )
        if self.teacher_temperature is not None and (
            self.support == "full"
            or not isinstance(self.loss, _SOFTENED)
            or getattr(self.loss, "kd_temperature", None) is not None
        ):
            raise invalid(
                "teacher_temperature",
                f"loss '{self.loss.type}' with support '{self.support}' has one temperature. Use "
                "'topk_kl', 'ctkd' or 'prefix_kl' without support 'full' and kd_temperature, or "
                "remove it.",
            )
        return self

    @model_validator(mode="after")
    def _validate_student_support(self) -> "TeacherConfig":
        if self.support != "student_topk":
            return self
        loss = self.loss
        first_rows = isinstance(loss, TopKKlConfig) or (
            isinstance(loss, CtkdConfig) and loss.span_rows == "first"
        )
        if not first_rows:
            raise invalid(
                "support",
                f"loss '{loss.type}' uses rows without a student top-k (found 'student_topk', "
                "expected loss topk_kl, or ctkd with span_rows 'first')",
            )
        return self

    @property
    def scored_temperature(self) -> float:
        """Softmax temperature of the requested scores."""
        return self.teacher_temperature or self.temperature

    @property
    def service(self) -> ServiceKind | None:
        """The kind of the service; None for a teacher in the trainer's process."""
        return None if self.local else SERVICE_KINDS[self.kind]

    @property
    def local(self) -> bool:
        """True if the teacher runs in the trainer's process."""
        return self.placement == "local"

    @property
    def fallback(self) -> str | None:
        """Name of the fallback teacher."""
        return self.on_error.removeprefix(_FALLBACK) if _FALLBACK in self.on_error else None

    @property
    def sends_token_ids(self) -> bool:
        """True if requests contain the student's token ids, not text."""
        loss = self.loss
        has_baseline = isinstance(loss, PolicyGradientConfig) and loss.baseline != "none"
        return isinstance(loss, TopKKlConfig) or has_baseline


class ScoreCacheConfig(Settings):
    """A store of scores that resumed runs and runs with other losses use again."""

    path: Path
    """Folder; several runs may share it."""
    max_gigabytes: float = Field(default=64.0, gt=0)
    """Maximum size in units of 10^9 bytes; the least recently used scores are removed first."""


def student_topk(teachers: Mapping[str, TeacherConfig]) -> int:
    """Return how many student ids at each token the teachers need; 0 for none."""
    sizes = (t.top_k for t in teachers.values() if t.support == "student_topk")
    return max(sizes, default=0)
