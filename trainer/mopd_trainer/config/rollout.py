"""``RolloutConfig`` and ``VllmConfig``: sampling of completions from the student."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mopd_trainer.config.settings import Incidental, Settings, invalid
from mopd_trainer.config.user_functions import is_function_name

#: The student's most likely ids that are kept at each token for corrections.
_CORRECTION_CANDIDATES = 64


class VllmConfig(Settings):
    """Settings of the vLLM rollout engine (``rollout.engine: vllm``), in separate processes."""

    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=1)
    """Fraction of an accelerator's memory for vLLM; leave room for a student on the same device. On
    a CPU, the cache gets a quarter of the free memory, at most 8 GiB; ``VLLM_CPU_KVCACHE_SPACE``
    sets another size in GiB."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Accelerators per model replica."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of concurrent completions."""
    weights_folder: Path | None = None
    """Folder for the weights of each push; a folder in memory is fastest. Default: the system's
    temporary folder."""


class AgentConfig(Settings):
    """The user's agent, which leads a conversation with the student (``rollout.agent``).

    Rejected: a name that is not ``python:module:function``.
    """

    function: str
    """``python:module:function``, an async function ``(prompt, client)``. ``await
    client.chat(messages, tools)`` returns the student's next message; ``client.base_url`` is the
    address for clients of the OpenAI API."""
    max_turns: int = Field(default=16, ge=1)
    """Maximum number of the student's turns in a trajectory; a further request ends it."""
    timeout_seconds: Incidental[float] = Field(default=600.0, gt=0)
    """Maximum time of a trajectory, sampling included."""
    on_error: Literal["fail", "drop"] = "fail"
    """An exception of the function: ``fail`` ends the run; ``drop`` drops and counts its
    trajectory."""

    @model_validator(mode="after")
    def _validate_function(self) -> "AgentConfig":
        if not is_function_name(self.function):
            raise invalid(
                "agent",
                f"invalid name (found {self.function!r}, expected 'python:module:function')",
            )
        return self


class RolloutConfig(Settings):
    """Sampling settings and size of a step.

    Rejected: ``on_stale: drop`` with ``max_staleness: 0``, several greedy samples of a prompt, and
    corrections of an agent's turns.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    """``transformers`` samples batches in the trainer's process; ``vllm`` samples in separate
    processes, with weights pushed after each step, and returns completions one by one."""
    vllm: Incidental[VllmConfig] = VllmConfig()
    """Settings of the vLLM engine."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts of a step."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions sampled for each prompt; a reference answer is used once."""
    max_new_tokens: int = Field(ge=1)
    """Maximum length of a completion. Longer reference answers are dropped and counted."""
    truncated: Literal["train", "drop"] = "train"
    """Completions that reach ``max_new_tokens``: ``train`` trains on them; ``drop`` drops and
    counts them before they are scored, so that no token of an unfinished completion is trained."""
    temperature: float = Field(default=0.6, ge=0)
    """Sampling temperature; 0 is greedy. Values other than 1 change the sampling distribution, but
    not the trained one. Default: 0.6, or 1 in a run with rewards or a loss of the sampled
    tokens (``policy_gradient``, ``k2``, ``k3``)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling threshold."""
    corrections: int = Field(default=1, ge=0)
    """Rounds of corrections. In each, the first token of a completion that its teacher finds
    implausible is replaced by one that agrees with the teacher's text, the student continues behind
    it, and the changed completion is scored again. They save a weak student steps. 0: plain
    on-policy samples. Default: 1, or 0 with an agent, the vLLM engine, ``scoring: after_rollout``,
    a control arm, rewards, or a loss of the sampled tokens (``policy_gradient``, ``k2``,
    ``k3``)."""
    correction_ratio: float = Field(default=0.01, gt=0, lt=1)
    """A token is implausible if it is less than this times as likely as the teacher's likeliest
    one. Larger values correct more."""
    correction_significance: float = Field(default=0.1, gt=0)
    """A completion is corrected only where the teacher itself would rarely write an implausible
    token: where fewer than this many are expected in its own text up to the corrected one. Long
    completions of a good student thus stay as they are. Larger values correct more."""
    generation_batch_size: int = Field(default=64, ge=1)
    """Completions that ``transformers`` samples at once; each batch is scored while the next is
    sampled. Reference answers are scored in batches of this size too."""
    agent: AgentConfig | None = None
    """Agent that leads a conversation of several turns from each prompt, or only its ``function``.
    Each turn of the student is a completion. Default: the student completes each prompt once."""
    scoring: Incidental[Literal["stream", "after_rollout"]] = "stream"
    """``stream`` scores completions as soon as they are finished; ``after_rollout`` scores all
    after the last one."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum age, in steps, of the weights that sampled a completion. 0: strictly on-policy. From
    1, the next steps are sampled during training (``transformers`` with a second copy of the
    weights), and a resumed run is no longer reproduced bit for bit."""
    on_stale: Literal["wait", "drop"] = "wait"
    """``wait`` samples nothing that could become too old; ``drop`` samples up to one step further
    ahead and drops and counts stale samples. A step without remaining samples is sampled again."""

    @model_validator(mode="before")
    @classmethod
    def _normalize_agent(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("agent"), str):  # pyright: ignore[reportUnknownMemberType]
            return {**values, "agent": {"function": values["agent"]}}
        return values  # pyright: ignore[reportUnknownVariableType]

    @model_validator(mode="after")
    def _validate_agent(self) -> "RolloutConfig":
        if self.agent is None:
            return self
        if "corrections" in self.model_fields_set and self.corrections:
            raise invalid(
                "corrections",
                "an agent has continued behind the completions that these would change (found "
                f"{self.corrections} and agent {self.agent.function!r}). Set it to 0.",
            )
        object.__setattr__(self, "corrections", 0)  # the model is frozen
        return self

    @property
    def correction_candidates(self) -> int:
        """Most likely ids of the student to keep at each token for corrections."""
        return _CORRECTION_CANDIDATES if self.corrections else 0

    @model_validator(mode="after")
    def _validate_sampling(self) -> "RolloutConfig":
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise invalid(
                "temperature",
                "greedy samples of a prompt are identical (found temperature 0 and "
                f"samples_per_prompt {self.samples_per_prompt}). Set samples_per_prompt to 1, or a "
                "temperature above 0.",
            )
        if self.on_stale == "drop" and self.max_staleness == 0:
            raise invalid(
                "on_stale",
                "'drop' with max_staleness 0 would drop every completion that is sampled ahead. "
                "Set max_staleness to 1 or more, or remove on_stale.",
            )
        return self
