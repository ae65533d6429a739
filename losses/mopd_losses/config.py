"""Settings of the losses: one class per loss, distinguished by ``type``. No torch here."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "adaptive_kl",
    "entropy_aware_kl",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "tvd",
]
Form = Literal["tail_bucket", "renormalised", "generalised"]

#: Which divergences read which parameter.
_READERS: dict[str, tuple[Divergence, ...]] = {
    "teacher_weight": ("jsd",),
    "tail_mass": ("adaptive_kl",),
    "entropy_threshold": ("entropy_aware_kl",),
    "skew": ("skewed_forward_kl", "skewed_reverse_kl"),
}


class ProjectionSettings(BaseModel):
    """Weights of the teacher's pieces for a student token that the teacher does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Literal["first", "decay"] = "first"
    """``first``: all on the first piece, which is what a teacher's first row is about. ``decay``:
    on the first ``max_length`` pieces, in proportion to ``decay ** r``, r = 0, 1, … (X-Token, arXiv
    2605.21699, whose first weight of 0.9 the normalisation takes out again)."""
    decay: float = Field(default=0.1, ge=0)
    max_length: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _only_decay_decays(self) -> "ProjectionSettings":
        changed = [
            name
            for name in ("decay", "max_length")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if changed and self.weights == "first":
            raise ValueError(
                f"{' and '.join(changed)} set, but projection weights 'first' put all on the first "
                "piece and do not read it; set weights to 'decay', or remove the setting"
            )
        return self

    def piece_weights(self, pieces: int) -> list[float]:
        """Weights of the first pieces, normalised to sum to one."""
        if self.weights == "first":
            return [1.0]
        raw = [self.decay**r for r in range(min(pieces, self.max_length))]
        return [weight / sum(raw) for weight in raw]


class DivergenceSettings(BaseModel):
    """A divergence and its own parameter.

    Refused: a parameter that is set but that the divergence does not read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    divergence: Divergence = "forward_kl"
    """``forward_kl`` covers all modes of the teacher; ``reverse_kl`` concentrates on some of them;
    the others lie between the two, or mix them."""
    teacher_weight: float = Field(default=0.5, ge=0, le=1)
    """``jsd``: the teacher's share of the mixture that both are compared with; 0 is forward KL and
    1 reverse KL, both unscaled."""
    tail_mass: float = Field(default=0.5, gt=0, lt=1)
    """``adaptive_kl``: the mass of the teacher's least likely ids that are called its tail."""
    entropy_threshold: float = Field(default=0.8, ge=0)
    """``entropy_aware_kl``: nats of the teacher's entropy above which forward KL is added to
    reverse KL; for teachers that often have several good continuations, of which reverse KL
    keeps few."""
    skew: float = Field(default=0.1, ge=0, lt=1)
    """``skewed_forward_kl``, ``skewed_reverse_kl``: how much of the first distribution is mixed
    into the one that it is compared with; 0 is plain KL."""

    @model_validator(mode="after")
    def _parameters_belong_to_the_divergence(self) -> "DivergenceSettings":
        for name, readers in _READERS.items():
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.divergence not in readers:
                raise ValueError(
                    f"{name} is set, but divergence '{self.divergence}' does not read it; "
                    f"it belongs to {' and '.join(readers)}"
                )
        return self

    @property
    def unbounded_where_teacher_vanishes(self) -> bool:
        """True if it grows without bound as the teacher's probability of a likely id vanishes."""
        return (
            self.divergence in ("reverse_kl", "adaptive_kl", "entropy_aware_kl")
            or (self.divergence == "jsd" and self.teacher_weight == 1)
            or (self.divergence == "skewed_reverse_kl" and self.skew == 0)
        )


class TopKDivergenceSettings(DivergenceSettings):
    """A divergence from a teacher's top-k.

    Refused: form ``generalised`` of another divergence than ``forward_kl`` and ``reverse_kl``; and,
    once the teacher is known, a ``kd_temperature`` that the teacher did not score at in any
    form but ``renormalised``.
    """

    form: Form = "tail_bucket"
    """Treatment of mass outside the top-k: one bucket on either side (``tail_bucket``), dropped
    with the rest scaled to one (``renormalised``), or dropped without scaling (``generalised``)."""
    kd_temperature: float | None = Field(default=None, gt=0)
    """Softmax temperature of both sides; none for the one that the teacher scores at."""

    @model_validator(mode="after")
    def _generalised_is_a_kl(self) -> "TopKDivergenceSettings":
        if self.form == "generalised" and self.divergence not in ("forward_kl", "reverse_kl"):
            raise ValueError(
                f"form 'generalised' of divergence '{self.divergence}': only forward_kl and "
                "reverse_kl have one; use form 'tail_bucket'"
            )
        return self


class CtkdConfig(TopKDivergenceSettings):
    """A divergence from a projected top-k, for a teacher with any tokenizer."""

    type: Literal["ctkd"] = "ctkd"
    projection: ProjectionSettings = ProjectionSettings()
    span_rows: Literal["first", "pooled"] = "first"
    """``first``: the two rows at the start of a span, which condition on the same text; ``pooled``:
    the means of all rows of a span."""


class TopKKlConfig(TopKDivergenceSettings):
    """A divergence from a top-k, for a teacher with the student's own tokenizer.

    The teacher is sent the sampled ids themselves: what a model samples is not always what its
    tokenizer would make of the text. Refused for a teacher with another tokenizer.
    """

    type: Literal["topk_kl"] = "topk_kl"


class PolicyGradientConfig(BaseModel):
    """Policy gradient on the text that the student sampled, for any teacher tokenizer.

    The advantage of a span, whose text both tokenizers delimit, is ``ln t - ln p``, the difference
    of the sums over its tokens on each side; where tokens align, a span is a token and the expected
    gradient that of reverse KL. Needs a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["policy_gradient"] = "policy_gradient"
    max_ratio: float = Field(default=2.0, gt=0)
    """Upper limit of the importance ratio of the current student to the sampling policy."""
    skew: float = Field(default=0.0, ge=0, lt=1)
    """The student's share of a proximal teacher, a mixture of both that the student is compared
    with: an advantage is at least ``ln skew``. 0: the teacher itself."""
    baseline: Literal["none", "top_k"] = "none"
    """``top_k``: subtract the mean advantage of the row's top-k and rest, which lowers the variance
    of the gradient and leaves its expectation. For a teacher with the student's own tokenizer,
    which then receives the sampled ids; refused for any other."""


class K2Config(BaseModel):
    """``(ln p - ln t)^2 / 2`` of the spans that the student sampled, as a supervised loss.

    On fresh samples its expected gradient is that of reverse KL. Needs samples at temperature 1
    without top-p, and a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["k2"] = "k2"


class K3Config(BaseModel):
    """``t / p - 1 - ln(t / p)`` of the spans that the student sampled, as a supervised loss.

    On fresh samples its value is reverse KL and its expected gradient that of *forward* KL. Needs
    what ``k2`` needs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["k3"] = "k3"


class PrefixKlConfig(DivergenceSettings):
    """A divergence on text at every token boundary of either side, for any teacher tokenizer.

    Compares how likely both models continue with the same strings, also inside long tokens and
    after tokens that could have been longer; see ``mopd_losses.prefix.loss``.
    """

    type: Literal["prefix_kl"] = "prefix_kl"
    mass_floor: float = Field(default=0.1, ge=0, le=1)
    """A boundary that the teacher reaches with a smaller probability, given the text at its first
    open row, weighs that probability over this floor: what the teacher's top-k contains about such
    a boundary is a small part of what may follow."""
    lookaheads: int = Field(default=2, ge=0)
    """Most texts per completion that a teacher scores in addition, where it is sure of a token that
    the completion does not continue with, and longer tokens of the student begin with that: ``1``
    of a teacher with single digits, for a student with whole numbers. Such a text ends with the
    student's likeliest of these longer tokens, if its likely ids are kept
    (``rollout.corrections``), so that all of that token is compared as long as the teacher is sure
    of it. The texts have the same prompt and the beginning of the completion; teachers with the
    student's kind of tokens get few or none."""
    lookahead_rounds: int = Field(default=3, ge=1)
    """Most times that such a text is scored: where the teacher is sure of another continuation than
    the text has, the next one has that, and ends with the student's likeliest token with it."""
    bounds: bool = True
    """Bound the mass that a side may have of a text over tokens that were not sampled, and count no
    loss within the bounds. ``false`` is for ablations (``bench.bounds``): preparation calls the
    tokenizers less, and two models that agree may have a loss."""


class AutoConfig(DivergenceSettings):
    """The recommended loss, by the teacher's tokenizer, with a divergence of your choice.

    ``topk_kl`` for a teacher with the student's own tokenizer, ``prefix_kl`` for any other.
    """

    type: Literal["auto"] = "auto"

    def resolved(self, *, same_tokenizer: bool) -> TopKKlConfig | PrefixKlConfig:
        """Return the settings of the loss for a teacher with or without the student's tokenizer."""
        loss = TopKKlConfig if same_tokenizer else PrefixKlConfig
        return loss(**self.model_dump(exclude={"type"}))


Direction = Literal["forward_kl", "reverse_kl"]
Merge = Literal["bayesian", "observed"]


class GoldConfig(BaseModel):
    """Ids in common by name, all others by rank (TRL's GOLD), for a teacher with any tokenizer.

    Refused: one of the two weights without the other. Needs a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["gold"] = "gold"
    beta: float = Field(default=0.5, ge=0, le=1)
    """The teacher's share of the mixture that ids in common are compared with; 0 is forward KL and
    1 reverse KL, both of parts that do not sum to one."""
    merge: Merge = "bayesian"
    """Merge of the rows of a longer span: by the chain rule, or ``observed`` as in TRL."""
    matched_weight: float | None = Field(default=None, ge=0)
    """Weight of ids in common; none for their share of the teacher's vocabulary."""
    unmatched_weight: float | None = Field(default=None, ge=0)
    """Weight of all other ids; none for one minus that share."""

    @model_validator(mode="after")
    def _both_weights_or_neither(self) -> "GoldConfig":
        if (self.matched_weight is None) != (self.unmatched_weight is None):
            raise ValueError(
                "one of matched_weight and unmatched_weight is set; set both, or neither for "
                "weights by how much of the vocabulary is in common"
            )
        return self


class UldConfig(BaseModel):
    """Sorted probabilities against sorted probabilities, regardless of ids: a baseline.

    Needs a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["uld"] = "uld"
    merge: Merge = "bayesian"
    """Merge of the rows of a longer span: by the chain rule, or ``observed`` as in TRL."""


class AlmConfig(BaseModel):
    """Equal likelihood of every aligned span, from one teacher probability a token.

    Needs a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["alm"] = "alm"
    divergence: Literal["kl", "tvd"] = "kl"
    """Between the two probabilities that the span follows."""
    tau: float | None = Field(default=None, gt=0)
    """Flattens both likelihoods first; none for the limit of large values, times the value."""


class SimctConfig(BaseModel):
    """First tokens in common, the whole span, and the rest, as one distribution.

    Needs a teacher that scores at temperature 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["simct"] = "simct"
    divergence: Direction = "reverse_kl"
    """``forward_kl`` covers all modes of the teacher; ``reverse_kl`` concentrates on some."""


LossConfig = Annotated[
    AutoConfig
    | CtkdConfig
    | TopKKlConfig
    | PrefixKlConfig
    | GoldConfig
    | UldConfig
    | AlmConfig
    | SimctConfig
    | PolicyGradientConfig
    | K2Config
    | K3Config,
    Field(discriminator="type"),
]
"""Settings of a loss, selected by ``type``."""


#: Losses on the student's samples; undefined or biased on other text.
ON_SAMPLES = (PolicyGradientConfig, K2Config, K3Config)


def described(config: LossConfig) -> str:
    """A loss in a few words, for plans and tables."""
    if not isinstance(config, DivergenceSettings):
        return config.type
    form = "" if not isinstance(config, TopKDivergenceSettings) else f", {config.form}"
    return f"{config.type} {config.divergence}{'' if form == ', tail_bucket' else form}"
