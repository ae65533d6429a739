"""What a run is: one frozen, checked value. No torch here, so that a wrong file fails at once."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mopd_losses.config import CtkdConfig, LossConfig, TopKKlConfig
from mopd_protocol.requests import LogprobsDtype


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Settings):
    """Where prompts come from and who judges each answer."""

    prompts: Path
    """A JSONL file: ``messages``, or ``prompt``, or the keys named below."""
    teacher_key: str | None = None
    """The key that names a line's teacher, or maps teachers to weights. Not set: the first of
    ``teacher``, ``data_source``, ``tag``, ``dataset`` that a line has."""
    default_teacher: str | None = None
    """Who judges lines that name no teacher; without it such a line is refused."""
    question_key: str | None = None
    """The key of the question, for data that has neither ``messages`` nor ``prompt``."""
    answer_key: str | None = None
    """The key of the reference answer: kept as metadata, never trained on by distillation."""
    shuffle: bool = True


class StudentConfig(_Settings):
    """The model that learns."""

    model: str
    """A Hugging Face model folder or hub name."""
    revision: str | None = None
    trust_remote_code: bool = False
    """Runs code from the model's repository. Off unless asked."""
    device: str = "auto"
    """``auto``: the first accelerator, or the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products. Weights, moments and sums are float32 either way."""
    learning_rate: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of ``learning_rate``."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    tokens_per_micro_batch: int = Field(default=16_384, ge=1)
    """Prompt, completion and padding tokens that stand on the device at once; changes memory and
    speed, never the gradient."""
    rows_per_block: int = Field(default=1_024, ge=1)
    """Completion tokens whose logits stand on the device at once; changes memory and speed, never
    the gradient."""


class RolloutConfig(_Settings):
    """How the student writes."""

    engine: Literal["transformers"] = "transformers"
    prompts_per_step: int = Field(default=64, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy. Other than 1, what is trained on is not what the student would write."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    generation_batch_size: int = Field(default=64, ge=1)
    """Completions written at once; each such batch goes to its teachers while the next is being
    written."""


class TeacherConfig(_Settings):
    """One teacher: where it is, what is asked of it, and what is learnt from it."""

    url: tuple[str, ...] = Field(min_length=1)
    """Replicas of one teacher."""
    top_k: int = Field(default=64, ge=1)
    weight: float = Field(default=1.0, gt=0)
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
    on_error: Literal["fail", "drop"] = "fail"
    """When the teacher stays unavailable: end the run, or drop the samples and count them."""

    @model_validator(mode="before")
    @classmethod
    def _one_url_is_a_list_of_one(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("url"), str):
            return {**values, "url": [values["url"]]}
        return values

    @property
    def sends_token_ids(self) -> bool:
        """The teacher is sent the student's own ids, not text."""
        return isinstance(self.loss, TopKKlConfig)


class LoggingConfig(_Settings):
    """What is written besides the journal (``journal.jsonl``, always)."""

    tensorboard: bool = True
    completions: int = Field(default=2, ge=0)
    """Completions a logged step that go to ``completions.jsonl``, to be read by people."""


class RunConfig(_Settings):
    """One run. Everything has its place here or a default; unknown keys are refused."""

    exp_name: str = "mopd"
    seed: int = Field(default=0, ge=0)
    output_dir: Path
    max_steps: int = Field(ge=1)
    save_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0: only at the end."""
    logging_steps: int = Field(default=1, ge=1)
    resume_from_checkpoint: bool | Path = False
    """``true``: the newest in ``output_dir`` (or the start, when there is none yet)."""
    teacher_wait_seconds: float = Field(default=60.0, gt=0)
    """How long teachers may take to become ready before the run gives up on them."""
    accept_changed_teachers: bool = False
    """Resume although a teacher's manifest is not the one that the checkpoint was made with."""
    projection_cache: Path | None = None
    """Folder of built projections, to share between runs. Not set: inside ``output_dir``."""
    data: DataConfig
    student: StudentConfig
    rollout: RolloutConfig
    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _default_teacher_is_known(self) -> "RunConfig":
        default = self.data.default_teacher
        if default is not None and default not in self.teachers:
            raise ValueError(
                f"data.default_teacher is {default!r}; "
                f"known teachers are {', '.join(sorted(self.teachers))}"
            )
        return self

    @property
    def projections(self) -> Path:
        """The folder of built projections."""
        return self.projection_cache or self.output_dir / "projections"
