"""Settings of the losses: one class a loss, told apart by ``type``. No torch here."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mopd_losses.projection import ProjectionSettings

Divergence = Literal["forward_kl", "reverse_kl"]


class CtkdConfig(BaseModel):
    """Projected top-k KL with a tail bucket, for a teacher with any tokenizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["ctkd"] = "ctkd"
    divergence: Divergence = "forward_kl"
    """``forward_kl`` covers all that the teacher might say; ``reverse_kl`` settles on its modes."""
    projection: ProjectionSettings = ProjectionSettings()


class TopKKlConfig(BaseModel):
    """Top-k KL with a tail bucket, for a teacher with the student's own tokenizer.

    The teacher is sent the sampled ids themselves: what a model samples is not always what its
    tokenizer would make of the text. Refused for a teacher with another tokenizer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["topk_kl"] = "topk_kl"
    divergence: Divergence = "forward_kl"


LossConfig = Annotated[CtkdConfig | TopKKlConfig, Field(discriminator="type")]
