"""``TokensConfig``: the tokens of sampled completions that teachers' losses train."""

from typing import Literal

from pydantic import Field

from mopd_trainer.config.settings import Settings


class TokensConfig(Settings):
    """Selection of tokens. The others have weight 0 in the teachers' losses, whose averages divide
    by the selected tokens; rewards and reference answers train all tokens."""

    first: int | None = Field(default=None, ge=1)
    """First tokens of a completion, of which ``share`` is selected; teachers score only these.
    Default: all."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tokens of each completion that is selected, rounded up."""
    by: Literal["entropy", "prefix_entropy", "divergence"] = "entropy"
    """Tokens to select, the largest first. ``entropy``: the entropy of the distribution that the
    token was sampled from; with engine ``vllm`` that of its 20 likeliest ids and one id for all
    others. Teachers score up to the last selected token. ``prefix_entropy``: the first tokens that
    together have ``share`` of the entropy; teachers score only these. ``divergence``: the absolute
    difference of the log-probabilities of student and teacher, of an aligned span if their tokens
    differ, per token of it; teachers score all tokens."""

    @property
    def keeps_entropies(self) -> bool:
        """True if the selection needs the entropies of sampled tokens."""
        return self.share < 1 and self.by != "divergence"
