"""``TeacherConfig``: one teacher of a run; and what is kept of all their scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mopd_client.services.vllm_routes import Api
from mopd_losses.config import CtkdConfig, LossConfig, TopKKlConfig
from mopd_protocol.requests import LogprobsDtype

_FALLBACK = "fallback:"
#: In place of the address of a teacher that the run will start.
_NOT_STARTED = "http://not-started-yet"
#: In place of the address of a teacher that has none.
_IN_THIS_PROCESS = "http://in-this-process"


class ServeConfig(BaseModel):
    """A ``mopd-teacher serve`` that the run starts itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """A model folder or hub id, on the machine where the service will stand."""
    devices: int = Field(default=1, ge=1)
    shares_with: str | None = None
    """The name of a teacher on whose devices this one stands too; they are counted once."""
    arguments: tuple[str, ...] = ()
    """More of ``mopd-teacher serve``, for instance ``[--engine, vllm]``."""


class TeacherConfig(BaseModel):
    """One teacher: where it is, what is asked of it, and what is learnt from it.

    Refused: two ways of deciding when to ask a second time; a stock vLLM server without a tokenizer
    or with what it cannot do, and its settings for a mopd service; a teacher in this process
    without a model, or with what only a service has; the student's support for a loss that reads
    more than the rows where the student has one; and whole rows of a service, or for a loss that
    has no use for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: tuple[str, ...] = Field(min_length=1)
    """Replicas of one teacher."""
    placement: Literal["url", "ray", "local"] = "url"
    """``url``: a service that runs already; ``ray``: one that the run starts as ``serve`` says,
    starts again when it dies, and ends with the run. Its url is then known when it has started.
    ``local``: ``model``, in the trainer's own process (every rank has a copy of it), asleep in the
    CPU's memory while the student writes and is trained, and awake on ``device`` to score, one
    such teacher at a time; needs ``rollout.scoring: after_rollout``."""
    serve: ServeConfig | None = None
    """What to start, where ``placement`` is ``ray``."""
    kind: Literal["mopd", "openai"] = "mopd"
    """``mopd``: a ``mopd-teacher serve``; ``openai``: a stock ``vllm serve`` (start it with
    ``--max-logprobs`` of at least ``top_k``, and with ``--enable-scale-out``: it is faster)."""
    tokenizer: str | None = None
    """``openai``: a folder, or a hub id, with the tokenizer of the served model."""
    model: str | None = None
    """``openai``: the name under which the server knows the model, where it serves several.
    ``local``: a model folder or hub name."""
    revision: str | None = None
    """``openai``: a name for these weights, because the server has none; a resumed run and a score
    cache tell teachers apart by it. ``local``: a commit, branch or tag of the hub."""
    api: Api = "auto"
    """``openai``: ``generate`` asks through ``/inference/v1/generate``, which ``vllm serve
    --enable-scale-out`` opens; ``completions`` through ``/v1/completions``, where every answer
    names the server's version too; ``auto``: the first where every replica has it, else the
    second."""
    device: str | None = None
    """``local``: where it scores. Not set: on the student's device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``local``: the precision of its forward pass; ``auto`` is float32 on a CPU and the model's
    own elsewhere, as in a service."""
    require_all_replicas: bool = True
    """A run starts when all replicas are ready, so that a wrong address is found at once; where
    this is ``false``, when one is, and the others are asked as soon as they answer."""
    top_k: int = Field(default=64, ge=1)
    support: Literal["teacher_topk", "student_topk", "full"] = "teacher_topk"
    """Whose most likely ids the two are compared on. ``student_topk``: the teacher is asked about
    the student's own ``top_k`` ids at every token (about their counterparts, where the tokenizers
    differ), so that a reverse divergence sees where the student puts its mass. ``full``: all ids,
    for ``topk_kl`` of a ``local`` teacher; its hidden states are kept, and its head stays on the
    student's device to make rows of them a block at a time."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of this teacher's loss."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of both sides of the loss; other than 1 only where the teacher's engine
    can (its manifest says so)."""
    loss: LossConfig = CtkdConfig()
    logprobs_dtype: LogprobsDtype = "float32"
    api_key_env: str | None = None
    """The environment variable that holds this teacher's API key."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """For one attempt."""
    deadline_seconds: float = Field(default=600.0, gt=0)
    """For one request with all its retries."""
    max_concurrency: int = Field(default=32, ge=1)
    """Requests that are under way at once; others wait their turn."""
    hedge_after_seconds: float | None = Field(default=None, gt=0)
    """A request that takes longer is sent to another replica too, and the sooner answer counts."""
    hedge_after_quantile: float | None = Field(default=None, gt=0, lt=1)
    """The same after this quantile of the teacher's own latencies so far, 0.95 for instance."""
    on_error: str = "fail"
    """When the teacher stays unavailable: ``fail`` ends the run; ``wait`` keeps asking until it is
    back; ``drop`` leaves the samples out; ``fallback:<teacher>`` gives them to another teacher of
    the run, with all its own settings (loss, weight, top_k), at this one's share of the sample.
    Samples that this teacher refuses are dropped and given away too, but end a run that would fail
    or wait; one that is too long for its teacher never ends a run. All is counted."""

    @model_validator(mode="before")
    @classmethod
    def _one_url_is_a_list_of_one(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        stands_in = {"ray": _NOT_STARTED, "local": _IN_THIS_PROCESS}.get(
            str(values.get("placement"))
        )
        if stands_in is not None:
            values = {"url": [stands_in], **values}
        if isinstance(values.get("url"), str):
            return {**values, "url": [values["url"]]}
        return values

    @field_validator("on_error")
    @classmethod
    def _a_known_policy(cls, policy: str) -> str:
        if policy in ("fail", "drop", "wait") or policy.removeprefix(_FALLBACK) not in ("", policy):
            return policy
        raise ValueError(f"found {policy!r}, expected fail, drop, wait or fallback:<teacher>")

    @model_validator(mode="after")
    def _it_is_somewhere(self) -> "TeacherConfig":
        if (self.placement == "ray") != (self.serve is not None):
            raise ValueError(
                f"placement is {self.placement!r} and serve is "
                f"{'not set' if self.serve is None else 'set'}; the two belong together"
            )
        return self

    @model_validator(mode="after")
    def _a_local_teacher_is_a_model(self) -> "TeacherConfig":
        if not self.local:
            given = [name for name in ("device", "dtype") if name in self.model_fields_set]
            if given and (self.device is not None or self.dtype != "auto"):
                raise ValueError(
                    f"{' and '.join(given)} given, but placement is {self.placement!r}: a service "
                    "is told that where it is started; remove it, or set placement to 'local'"
                )
            return self
        if self.model is None:
            raise ValueError(
                "placement is 'local' and model is not set; set it to a model folder or hub name"
            )
        given = [name for name in ("tokenizer", "api_key_env") if getattr(self, name) is not None]
        given += [f"kind {self.kind!r}"] if self.kind != "mopd" else []
        given += ["url"] if self.url != (_IN_THIS_PROCESS,) else []
        if given:
            raise ValueError(
                f"{' and '.join(given)} given, but placement is 'local', and nobody is asked over "
                "HTTP; remove it, or set placement to 'url'"
            )
        return self

    @model_validator(mode="after")
    def _whole_rows_can_be_had(self) -> "TeacherConfig":
        if self.support == "full" and not (self.local and isinstance(self.loss, TopKKlConfig)):
            raise ValueError(
                f"support is 'full', but placement is {self.placement!r} and loss "
                f"'{self.loss.type}'; expected a 'local' teacher and topk_kl, which compares two "
                "models of one tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_hedge(self) -> "TeacherConfig":
        if self.hedge_after_seconds is not None and self.hedge_after_quantile is not None:
            raise ValueError(
                "hedge_after_seconds and hedge_after_quantile are both set; expected one of them"
            )
        return self

    @model_validator(mode="after")
    def _settings_are_of_the_kind(self) -> "TeacherConfig":
        own = {name: getattr(self, name) for name in ("tokenizer", "model", "revision")}
        given = [name for name, value in own.items() if value is not None]
        given += ["api"] if self.api != "auto" else []
        if self.kind == "mopd" and given and not self.local:
            raise ValueError(
                f"{' and '.join(given)} given, but a mopd service tells that itself; remove it, or "
                "set kind to 'openai'"
            )
        if self.kind == "openai" and self.tokenizer is None:
            raise ValueError(
                "kind 'openai' without a tokenizer; set it to the folder or hub id of the served "
                "model"
            )
        if self.kind == "openai" and self.temperature != 1.0:
            raise ValueError(
                f"temperature is {self.temperature:g}, but a stock vLLM server scores at 1 only; "
                "set it to 1, or serve the model with mopd-teacher"
            )
        return self

    @model_validator(mode="after")
    def _the_students_support_can_be_had(self) -> "TeacherConfig":
        if self.support != "student_topk":
            return self
        loss = self.loss
        first_rows = isinstance(loss, TopKKlConfig) or (
            isinstance(loss, CtkdConfig) and loss.span_rows == "first"
        )
        if not first_rows:
            raise ValueError(
                f"support is 'student_topk', but loss '{loss.type}' reads rows at which the "
                "student has no ids of its own; expected topk_kl, or ctkd with span_rows first"
            )
        if self.kind == "openai":
            raise ValueError(
                "support is 'student_topk', but a stock vLLM server scores its own top-k only; "
                "set it to 'teacher_topk', or serve the model with mopd-teacher"
            )
        return self

    @property
    def local(self) -> bool:
        """Whether it is in this process."""
        return self.placement == "local"

    @property
    def fallback(self) -> str | None:
        """The teacher that gets what this one cannot judge."""
        return self.on_error.removeprefix(_FALLBACK) if _FALLBACK in self.on_error else None

    @property
    def sends_token_ids(self) -> bool:
        """The teacher is sent the student's own ids, not text."""
        return isinstance(self.loss, TopKKlConfig)


class ScoreCacheConfig(BaseModel):
    """Where scores are kept, so that a resumed run and another loss ask nothing twice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    """A folder, which runs may share."""
    max_gigabytes: float = Field(default=64.0, gt=0)
    """In units of 10^9 bytes; the least recently used scores go first."""


def require_fallbacks_that_end(teachers: Mapping[str, TeacherConfig]) -> None:
    """Every fallback is a teacher of the run, and none leads back to where it began.

    Raises:
        ValueError: when not.
    """
    for name in teachers:
        chain = [name]
        while (following := teachers[chain[-1]].fallback) is not None:
            if following not in teachers:
                raise ValueError(
                    f"teacher {chain[-1]!r} falls back to {following!r}; "
                    f"known teachers are {', '.join(sorted(teachers))}"
                )
            if following in chain:
                raise ValueError(
                    f"teacher {name!r} falls back to itself ({' -> '.join([*chain, following])}); "
                    "expected a chain that ends with fail, drop or wait"
                )
            chain.append(following)


def require_names_for_cached_weights(teachers: Mapping[str, TeacherConfig]) -> None:
    """A cache finds scores by who gave them, so every teacher must say which weights it has.

    Raises:
        ValueError: when one does not.
    """
    for name, teacher in teachers.items():
        if teacher.kind == "openai" and teacher.revision is None:
            raise ValueError(
                f"score_cache is set, but teacher {name!r} is a stock vLLM server, which does not "
                "tell its weights apart from others of this name; set the teacher's revision"
            )


def student_topk(teachers: Mapping[str, TeacherConfig]) -> int:
    """How many of the student's own ids at each token its teachers are asked about; 0 for none."""
    asked = (t.top_k for t in teachers.values() if t.support == "student_topk")
    return max(asked, default=0)
