"""``StudentConfig`` and ``LoraConfig``: the trained model and its optimizer."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mopd_protocol.requests import ChatTemplateKwargs
from mopd_trainer.config.settings import Incidental, Settings, invalid

#: Decay rate of an optimizer moment.
_Beta = Annotated[float, Field(ge=0, lt=1)]

AttentionImplementation = Literal[
    "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
]


class LoraConfig(Settings):
    """LoRA adapters (``pip install '.[lora]'``): the base weights are frozen, and a low-rank
    product is trained for each linear layer. ``lora: {}`` uses the defaults.

    The embedding and the head are not adapted. Checkpoints contain only the adapters; ``mopd
    merge`` saves the merged model.
    """

    rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter matrices."""
    alpha: int = Field(default=32, ge=1)
    """The adapter output is scaled by ``alpha / rank``."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter inputs. Above 0, results depend on packing and on the number of
    ranks."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers with adapters, by the suffixes of their names (``[q_proj, v_proj]``)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random adapter matrix; the second matrix is initialised with zeros, so that the
    first step uses the base model."""

    @model_validator(mode="after")
    def _validate_target_modules(self) -> "LoraConfig":
        if not self.target_modules:
            raise invalid(
                "target_modules",
                "the list is empty, so that nothing is trained. Name linear layers, or use "
                "'all-linear'.",
            )
        return self


class HubConfig(Settings):
    """Repository on the Hugging Face hub (or ``HF_ENDPOINT``) for the trained model. The token is
    ``HF_TOKEN`` or that of ``hf auth login``."""

    repo_id: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$", max_length=96)
    """Repository (``organization/name``), created if it does not exist."""
    private: bool = True
    """Visibility of a repository that is created."""
    revision: str | None = None
    """Branch, created if it does not exist. Default: the main branch."""


class StudentConfig(Settings):
    """The trained model, its optimizer and its memory use."""

    model: Incidental[str]
    """Hugging Face model folder or hub name."""
    revision: Incidental[str | None] = None
    """Commit, branch or tag of the hub model."""
    trust_remote_code: Incidental[bool] = False
    """Execute code from the model's repository."""
    chat_template_kwargs: ChatTemplateKwargs = Field(default_factory=dict)
    """Variables of the student's chat template (``{enable_thinking: false}``)."""
    final_dtype: Incidental[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Precision of the trained model (``final``); ``auto`` is that of the published weights.
    Checkpoints and adapters are float32."""
    push_to_hub: Incidental[HubConfig | None] = None
    """Upload ``final`` to the hub after training. If that fails, the saved folder is complete."""
    device: Incidental[str] = "auto"
    """``auto``: the first accelerator, or the CPU."""
    sharding: Incidental[Literal["none", "ddp", "fsdp"]] = "none"
    """Data parallelism over several ranks: ``fsdp`` shards weights and optimizer moments, ``ddp``
    replicates both. The results are identical."""
    dropout: Literal["off", "model"] = "off"
    """Dropout of the model's own configuration in training. ``off``: none, so that a student that
    equals its teacher has no loss; ``model``: as configured. Adapters have ``lora.dropout``."""
    lora: LoraConfig | None = None
    """Default: all parameters are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products. Trained weights, moments and sums are always float32; weights
    that ``lora`` freezes have this precision."""
    learning_rate: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a fraction of ``learning_rate``."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping norm."""
    skip_grad_norm_above: Incidental[float | None] = Field(default=None, gt=0)
    """Skip and count a step with a larger gradient norm (before clipping)."""
    on_nonfinite: Incidental[Literal["stop", "skip"]] = "stop"
    """NaN or infinite loss or gradient: ``stop`` ends the run before weights change; ``skip`` skips
    and counts the step."""
    max_skipped_in_a_row: Incidental[int] = Field(default=5, ge=1)
    """Maximum number of consecutive skipped steps, for either reason or because all samples were
    dropped; above it the run ends."""
    tokens_per_micro_batch: Incidental[int] = Field(default=16_384, ge=1)
    """Prompt, completion and padding tokens of a micro-batch; affects memory and speed, not the
    gradient: the gradients of all micro-batches are summed, and divided by the tokens of the
    step."""
    packing: Incidental[Literal["auto", "packed", "padded"]] = "auto"
    """Layout of a micro-batch. ``packed``: all examples in one row without padding, each with its
    positions and its attention; ``padded``: one example per row. ``auto``: packed, if a short test
    at the start finds the same hidden states in both. Affects memory and speed, not the
    gradient."""
    attn_implementation: Incidental[AttentionImplementation] = "auto"
    """Attention of transformers. ``auto``: ``sdpa`` where the model has it. ``flash_attention_2``
    (``pip install flash-attn``) and ``flash_attention_3`` need an accelerator and ``dtype:
    bfloat16``, ``flex_attention`` an accelerator. ``eager`` is never packed by ``auto``."""
    rows_per_block: Incidental[int] = Field(default=1_024, ge=1)
    """Completion tokens whose logits are materialised at once; affects memory and speed, not the
    gradient."""
    gradient_checkpointing: Incidental[bool] = False
    """Recompute layers in the backward pass: less memory, more time, identical gradient."""
    distill_loss_weight: float = Field(default=1.0, ge=0, le=1)
    """w in ``(1 - w) * cross entropy + w * distillation`` on reference answers; 0 is plain SFT
    without teachers. Rollouts are always trained with distillation only."""

    @property
    def uses_flash_attention(self) -> bool:
        """True for flash attention, which needs half precision and a package."""
        return self.attn_implementation.startswith("flash")

    @model_validator(mode="after")
    def _validate_attention(self) -> "StudentConfig":
        if self.uses_flash_attention and self.dtype == "float32":
            raise invalid(
                "attn_implementation",
                f"{self.attn_implementation!r} needs half precision (found dtype 'float32', "
                "expected 'bfloat16'). Set dtype to 'bfloat16', or this to 'sdpa'.",
            )
        return self

    def learning_rate_at(self, step: int, *, max_steps: int) -> float:
        """Return linear warm-up, then cosine decay to ``min_learning_rate_ratio``; steps from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps)
        floor = self.min_learning_rate_ratio
        return self.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
