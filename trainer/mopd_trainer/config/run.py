"""What a run is: one frozen, checked value. No torch here, so that a wrong file fails at once."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mopd_losses.config import ON_SAMPLES, K2Config, K3Config, PolicyGradientConfig
from mopd_protocol.samples import Source
from mopd_trainer.config.resources import ResourcesConfig
from mopd_trainer.config.teacher import (
    ScoreCacheConfig,
    TeacherConfig,
    require_fallbacks_that_end,
    require_names_for_cached_weights,
    student_topk,
)

#: How much of a moment stays from step to step.
_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Settings):
    """Where prompts come from, who answers them and who judges each answer.

    Refused: a source that ``on_policy_fraction`` leaves nothing to.
    """

    prompts: Path
    """A JSONL file: ``messages``, or ``prompt``, or the keys named below."""
    source: Source = "rollout"
    """Who completes prompts: the student (``rollout``), or the data, with each line's reference
    answer (``answers``)."""
    on_policy_fraction: float | None = Field(default=None, ge=0, le=1)
    """The share of a step's prompts that the student answers itself; the others are learnt from
    their reference answers. Not set: all for ``rollout``, none for ``answers``."""
    teacher_key: str | None = None
    """The key that names a line's teacher, or maps teachers to weights. Not set: the first of
    ``teacher``, ``data_source``, ``tag``, ``dataset`` that a line has."""
    default_teacher: str | None = None
    """Who judges lines that name no teacher; without it such a line is refused."""
    question_key: str | None = None
    """The key of the question, for data that has neither ``messages`` nor ``prompt``."""
    answer_key: str | None = None
    """The key of the reference answer. Where the run learns from answers and this is not set, the
    last message of ``messages`` is the answer, by the assistant; where it does not, an answer is
    only kept with its completion to be read."""
    shuffle: bool = True
    on_bad_line: Literal["fail", "skip"] = "fail"
    """When a line cannot be used: ``fail`` refuses the file, ``skip`` leaves the line out; how many
    were, and why the first of them, is told before the run begins."""

    @model_validator(mode="after")
    def _the_source_is_used(self) -> "DataConfig":
        if self.on_policy_fraction == (0 if self.source == "rollout" else 1):
            raise ValueError(
                f"data.on_policy_fraction is {self.on_policy_fraction:g}, which leaves nothing to "
                f"data.source '{self.source}'; set data.source to "
                f"'{'answers' if self.source == 'rollout' else 'rollout'}'"
            )
        return self

    @property
    def rollout_share(self) -> float:
        """The share of prompts that the student answers itself."""
        if self.on_policy_fraction is None:
            return 1.0 if self.source == "rollout" else 0.0
        return self.on_policy_fraction

    @property
    def uses_reference_answers(self) -> bool:
        """Whether the run learns from reference answers."""
        return self.rollout_share < 1


class LoraConfig(_Settings):
    """LoRA: the model's own weights stay as they are, and a product of two small matrices beside
    each of its linear layers is trained (``mopd[lora]``). ``lora: {}`` takes the defaults.

    The embedding and the head are not adapted. A checkpoint holds the adapters alone, and
    ``mopd merge`` writes the whole model.
    """

    rank: int = Field(default=16, ge=1, le=512)
    """Rows of the one matrix and columns of the other."""
    alpha: int = Field(default=32, ge=1)
    """What the matrices make is scaled by ``alpha / rank``."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of a layer's inputs that adapters do not see while training. Above 0, what a step
    does depends on how it is packed and shared among ranks, as what is dropped does."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that get adapters, by the ends of their names (``[q_proj, v_proj]``)."""
    seed: int = Field(default=0, ge=0)
    """Of the one matrix's first values; the other begins as zeros, so that the first step sees the
    model as it is."""

    @model_validator(mode="after")
    def _something_is_adapted(self) -> "LoraConfig":
        if not self.target_modules:
            raise ValueError(
                "student.lora.target_modules is empty, so nothing would be trained; name linear "
                "layers, or set it to 'all-linear'"
            )
        return self


class StudentConfig(_Settings):
    """The model that learns."""

    model: str
    """A Hugging Face model folder or hub name."""
    revision: str | None = None
    trust_remote_code: bool = False
    """Runs code from the model's repository. Off unless asked."""
    device: str = "auto"
    """``auto``: the first accelerator, or the CPU."""
    sharding: Literal["none", "ddp", "fsdp"] = "none"
    """For several ranks: ``fsdp``, each has its part of weights and moments; ``ddp``, each has
    all of them. The result is the same."""
    lora: LoraConfig | None = None
    """Not set: all parameters are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products. Weights that are trained, moments and sums are float32 either
    way; those that ``lora`` leaves as they are have this precision too."""
    learning_rate: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of ``learning_rate``."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    skip_grad_norm_above: float | None = Field(default=None, gt=0)
    """A step whose gradient, before clipping, is longer than this is left out, and counted."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a step's loss or gradient is NaN or infinite: ``stop`` ends the run before anything is
    changed; ``skip`` leaves the step out, and counts it."""
    max_skipped_in_a_row: int = Field(default=5, ge=1)
    """After more steps left out one after another, for one of these reasons or because all of their
    samples were dropped, the run ends."""
    tokens_per_micro_batch: int = Field(default=16_384, ge=1)
    """Prompt, completion and padding tokens that stand on the device at once; changes memory and
    speed, never the gradient."""
    rows_per_block: int = Field(default=1_024, ge=1)
    """Completion tokens whose logits stand on the device at once; changes memory and speed, never
    the gradient."""
    gradient_checkpointing: bool = False
    """Keeps only each layer's input and runs the layer again in the backward pass: less memory,
    more time, the same gradient."""
    distill_loss_weight: float = Field(default=1.0, ge=0, le=1)
    """w in ``(1 - w) * cross entropy + w * distillation`` of a reference answer; 0 is plain SFT,
    and no teacher reads the answers then. What the student wrote itself is only distilled."""


class VllmConfig(_Settings):
    """vLLM as the student's pen (``rollout.engine: vllm``), in processes of its own."""

    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """The share of an accelerator's memory that vLLM plans with, where the student that is trained
    may be on it too. On a CPU, ``VLLM_CPU_KVCACHE_SPACE`` says how many GiB."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Accelerators that share one copy of the model."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Completions that are written at once."""
    weights_folder: Path | None = None
    """Where weights pass from the student to vLLM after each step; one in memory is fastest. Not
    set: the system's temporary folder."""


class RolloutConfig(_Settings):
    """How the student writes, and how much a step takes.

    Refused: ``on_stale`` without staleness.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    """``transformers`` writes in this process, a generation batch at a time; ``vllm`` in processes
    of its own, with the weights of each step pushed to it, one completion as each is finished."""
    vllm: VllmConfig = VllmConfig()
    prompts_per_step: int = Field(default=64, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions that the student writes for a prompt; a reference answer is taken once."""
    max_new_tokens: int = Field(ge=1)
    """Longest completion. A reference answer that is longer is dropped and counted."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy. Other than 1, what is trained on is not what the student would write."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    generation_batch_size: int = Field(default=64, ge=1)
    """Completions that ``transformers`` writes at once; each such batch goes to its teachers while
    the next is being written. Reference answers are sent in batches of this size too."""
    scoring: Literal["stream", "after_rollout"] = "stream"
    """When teachers read: what is finished while the rest is being written, or everything when all
    is written."""
    max_staleness: int = Field(default=0, ge=0)
    """How many steps old the weights may be that wrote what a step learns from. 0: strictly
    on-policy. From 1 on the student writes the next steps while it is trained, ``transformers``
    with a second copy of the weights, and a resumed run no longer repeats itself bit for bit."""
    on_stale: Literal["wait", "drop"] = "wait"
    """``wait``: nothing is written that could be too old when it is learnt from. ``drop``: the
    student writes up to one step further ahead, and what is too old then is dropped and counted; a
    step of which nothing is left is written again."""

    @model_validator(mode="after")
    def _samples_of_a_prompt_differ(self) -> "RolloutConfig":
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                "rollout.temperature is 0, so that all of rollout.samples_per_prompt "
                f"{self.samples_per_prompt} would be the same; set it to 1, or temperature above 0"
            )
        return self

    @model_validator(mode="after")
    def _only_the_stale_are_dropped(self) -> "RolloutConfig":
        if self.on_stale == "drop" and self.max_staleness == 0:
            raise ValueError(
                "rollout.on_stale is 'drop', but with rollout.max_staleness 0 everything that is "
                "written ahead would be dropped; set max_staleness to 1 or more, or leave on_stale"
            )
        return self


class LoggingConfig(_Settings):
    """What is written besides the journal (``journal.jsonl``, always)."""

    tensorboard: bool = True
    wandb: bool = False
    """The same numbers for Weights & Biases, which reads its own variables (``WANDB_MODE``)."""
    trackio: bool = False
    """The same numbers for trackio."""
    project: str = "mopd"
    """Under which these two show the run, by its ``exp_name``."""
    record: bool = False
    """Keeps every step's completions and scores in ``recordings``, for another run to ``replay``:
    about 24 + 8 ``top_k`` bytes a token and teacher."""
    completions: int = Field(default=2, ge=0)
    """Completions of each source that go to ``completions.jsonl`` in a logged step and in the
    first, to be read by people: their text, and what each of their first 512 tokens cost by each
    teacher, which colours them in the report."""


class RunConfig(_Settings):
    """One run. Everything has its place here or a default; unknown keys are refused.

    Refused: cross entropy on what the student wrote itself, a run that has somebody to ask and no
    teacher, and losses on the student's samples where teachers read reference answers.
    """

    exp_name: str = "mopd"
    seed: int = Field(default=0, ge=0)
    output_dir: Path
    max_steps: int = Field(ge=1)
    save_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0: only at the end."""
    keep_checkpoints: int | None = Field(default=3, ge=0)
    """How many of the newest checkpoints stay; 0 or ``null``: all. While one is written, one more
    is there."""
    best_checkpoint_metric: str | None = None
    """A name of the journal (``loss``, ``teacher/math/loss_per_token``): the checkpoint with the
    best mean of it, over the steps since the checkpoint before, stays too."""
    best_checkpoint_mode: Literal["min", "max"] = "min"
    logging_steps: int = Field(default=1, ge=1)
    resume_from_checkpoint: bool | Path = False
    """``true``: the newest in ``output_dir`` (or the start, when there is none yet)."""
    teacher_wait_seconds: float = Field(default=60.0, gt=0)
    """How long teachers may take to become ready before the run gives up on them."""
    accept_changed_teachers: bool = False
    """Resume although a teacher's manifest is not the one that the checkpoint was made with."""
    accept_changed_settings: bool = False
    """Resume although the data, the seed or a setting that decides what is trained is not the one
    that the checkpoint was made with; ``max_steps`` is one, where the learning rate comes down."""
    projection_cache: Path | None = None
    """Folder of built projections, to share between runs. Not set: inside ``output_dir``."""
    score_cache: ScoreCacheConfig | None = None
    """A folder of teachers' scores, or ``{path, max_gigabytes}``. Not set: none are kept."""
    replay: Path | None = None
    """The ``output_dir`` of a run with ``logging.record``: what it recorded is learnt from, with
    any loss, in place of new completions and scores. Nobody is asked."""
    data: DataConfig
    student: StudentConfig
    rollout: RolloutConfig
    teachers: dict[str, TeacherConfig]
    """Who judges completions, by name; ``{}`` for plain SFT."""
    logging: LoggingConfig = LoggingConfig()
    resources: ResourcesConfig | None = None
    """Devices of a Ray cluster. Not set: the run is this process, or the ranks of ``torchrun``."""

    @model_validator(mode="after")
    def _placed_teachers_have_a_place(self) -> "RunConfig":
        for name, teacher in self.teachers.items():
            if teacher.serve is None:
                continue
            if self.resources is None:
                raise ValueError(
                    f"teacher {name!r} has placement 'ray', but there is no resources section"
                )
            other = teacher.serve.shares_with
            if other is not None and (
                other not in self.teachers
                or (host := self.teachers[other].serve) is None
                or host.shares_with is not None
            ):
                raise ValueError(
                    f"teacher {name!r} shares the devices of {other!r}, which has none of its own"
                )
        return self

    @model_validator(mode="after")
    def _workers_have_work(self) -> "RunConfig":
        workers = 0 if self.resources is None else self.resources.rollout_workers
        if workers and not self.samples_rollouts:
            raise ValueError(
                f"resources.rollout_workers is {workers}, but the student writes nothing in this "
                "run; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _uncorrected_samples_are_fresh(self) -> "RunConfig":
        ahead = self.rollout.max_staleness
        for name, teacher in self.teachers.items():
            if ahead and isinstance(teacher.loss, K2Config | K3Config):
                raise ValueError(
                    f"teacher {name!r} has loss '{teacher.loss.type}', which is right for samples "
                    f"of the weights that are trained, but rollout.max_staleness is {ahead}; set "
                    "it to 0, or use 'policy_gradient', which weighs older samples"
                )
        return self

    @model_validator(mode="after")
    def _uncorrected_samples_are_drawn_as_they_are_weighed(self) -> "RunConfig":
        rollout = self.rollout
        if not self.samples_rollouts:
            return self
        for name, teacher in self.teachers.items():
            warped = rollout.temperature != 1 or rollout.top_p != 1
            if warped and isinstance(teacher.loss, K2Config | K3Config):
                raise ValueError(
                    f"teacher {name!r} has loss '{teacher.loss.type}', which is right for samples "
                    "of the student as it is, but rollout.temperature is "
                    f"{rollout.temperature:g} and rollout.top_p {rollout.top_p:g}; set both to 1, "
                    "or use 'policy_gradient', which weighs samples by how they were drawn"
                )
            if rollout.temperature == 0 and isinstance(teacher.loss, PolicyGradientConfig):
                raise ValueError(
                    f"teacher {name!r} has loss 'policy_gradient', but rollout.temperature is 0, "
                    "and what is not drawn by chance has no importance; raise the temperature"
                )
        return self

    @model_validator(mode="after")
    def _local_teachers_have_their_turn(self) -> "RunConfig":
        for name, teacher in self.teachers.items():
            if not teacher.local:
                continue
            if self.rollout.scoring != "after_rollout" or self.rollout.max_staleness:
                raise ValueError(
                    f"teacher {name!r} has placement 'local', so it sleeps while the student "
                    f"writes and is trained, but rollout.scoring is '{self.rollout.scoring}' and "
                    f"rollout.max_staleness {self.rollout.max_staleness}; set scoring to "
                    "'after_rollout' and max_staleness to 0"
                )
            if teacher.support == "full" and (self.logging.record or self.replay is not None):
                raise ValueError(
                    f"teacher {name!r} has support 'full', and whole rows are neither recorded nor "
                    "replayed; set its support to 'teacher_topk', or leave out logging.record and "
                    "replay"
                )
        return self

    @model_validator(mode="after")
    def _default_teacher_is_known(self) -> "RunConfig":
        default = self.data.default_teacher
        if default is not None and default not in self.teachers:
            raise ValueError(
                f"data.default_teacher is {default!r}; "
                f"known teachers are {', '.join(sorted(self.teachers)) or 'none'}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _a_score_cache_is_a_path(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("score_cache"), str | Path):
            return {**values, "score_cache": {"path": values["score_cache"]}}
        return values

    @model_validator(mode="after")
    def _teachers_fit_together(self) -> "RunConfig":
        require_fallbacks_that_end(self.teachers)
        if self.score_cache is not None:
            require_names_for_cached_weights(self.teachers)
        return self

    @model_validator(mode="after")
    def _cross_entropy_is_on_answers(self) -> "RunConfig":
        if self.student.distill_loss_weight < 1 and not self.data.uses_reference_answers:
            raise ValueError(
                f"student.distill_loss_weight is {self.student.distill_loss_weight:g}, but every "
                "completion is the student's own, and cross entropy on those would train it to "
                "repeat itself; set data.source to 'answers', or the weight to 1"
            )
        return self

    @model_validator(mode="after")
    def _somebody_judges(self) -> "RunConfig":
        if self.needs_teachers and not self.teachers:
            raise ValueError(
                "teachers is empty, but completions are to be judged; name a teacher, or for plain "
                "SFT set data.source to 'answers' and student.distill_loss_weight to 0"
            )
        return self

    @model_validator(mode="after")
    def _losses_on_samples_see_samples(self) -> "RunConfig":
        for name, teacher in self.teachers.items():
            if self.scores_reference_answers and isinstance(teacher.loss, ON_SAMPLES):
                raise ValueError(
                    f"teacher {name!r} has loss '{teacher.loss.type}', which is about what the "
                    "student itself wrote and how likely it was to, but is to judge reference "
                    "answers too; use another loss, or set student.distill_loss_weight to 0 or "
                    "data.source to 'rollout'"
                )
        return self

    @model_validator(mode="after")
    def _the_students_ids_are_known(self) -> "RunConfig":
        if self.scores_reference_answers and student_topk(self.teachers):
            raise ValueError(
                "a teacher has support 'student_topk', but is to judge reference answers, at which "
                "the student has no ids yet; set its support to 'teacher_topk', or data.source to "
                "'rollout'"
            )
        return self

    @model_validator(mode="after")
    def _a_replay_is_not_recorded(self) -> "RunConfig":
        if self.replay is not None and self.logging.record:
            raise ValueError(
                "logging.record is set, but a replay has nothing new to record; leave out one of "
                "replay and logging.record"
            )
        return self

    @model_validator(mode="after")
    def _vllm_tells_the_students_ids(self) -> "RunConfig":
        if self.rollout.engine == "vllm" and self.rollout.top_p < 1 and student_topk(self.teachers):
            raise ValueError(
                f"a teacher has support 'student_topk', but rollout.top_p is {self.rollout.top_p:g}"
                " and vLLM tells no ids outside of that; set top_p to 1, or rollout.engine to "
                "'transformers'"
            )
        return self

    @property
    def samples_rollouts(self) -> bool:
        """Whether the student writes anything: not on written answers alone, nor in a replay."""
        return self.data.rollout_share > 0 and self.replay is None

    @property
    def scores_reference_answers(self) -> bool:
        """Whether teachers read reference answers."""
        return self.data.uses_reference_answers and self.student.distill_loss_weight > 0

    @property
    def needs_teachers(self) -> bool:
        """Whether teachers read anything."""
        return self.data.rollout_share > 0 or self.scores_reference_answers

    @property
    def scoring_teachers(self) -> dict[str, TeacherConfig]:
        """The teachers that are asked: all, or none where nothing is judged."""
        return self.teachers if self.needs_teachers else {}

    @property
    def contacted_teachers(self) -> dict[str, TeacherConfig]:
        """The teachers that are contacted: those who judge, unless what they said is replayed."""
        return self.scoring_teachers if self.replay is None else {}

    @property
    def projection_folder(self) -> Path:
        """The folder of built projections."""
        return self.projection_cache or self.output_dir / "projections"
