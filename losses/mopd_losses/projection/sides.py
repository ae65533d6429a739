"""The two tokenizers that a loss compares, and the projection between their vocabularies."""

from typing import Protocol

from mopd_losses.config import (
    AutoConfig,
    CtkdConfig,
    LossConfig,
    TopKKlConfig,
)
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix, identity_projection
from mopd_protocol.errors import ConfigError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable


class TokenizerSide(Protocol):
    """A tokenizer: a teacher's, or the student's."""

    @property
    def table(self) -> TokenTable:
        """The bytes of every token id."""
        ...

    @property
    def encoder(self) -> TextEncoder:
        """Encoder of completions. Read on demand: a large vocabulary takes seconds to set up."""
        ...


class StudentSide(TokenizerSide, Protocol):
    """The student's tokenizer and the width of the student's logits."""

    @property
    def logit_width(self) -> int:
        """Rows of the student's head, padding included."""
        ...


def resolve_loss(config: LossConfig, student: TokenizerSide, teacher: TokenizerSide) -> LossConfig:
    """Return the settings that ``auto`` selects for two tokenizers; other settings unchanged."""
    if not isinstance(config, AutoConfig):
        return config
    same = student.table.fingerprint == teacher.table.fingerprint
    return config.resolved(same_tokenizer=same)


def find_projection(
    config: LossConfig, student: StudentSide, teacher: TokenizerSide, cache: ProjectionCache
) -> ProjectionMatrix:
    """Return the projection that a loss reads, from the cache or built.

    Losses that read no projection get the default one, which measures vocabulary coverage.

    Raises:
        ConfigError: if a same-tokenizer loss is configured for two different tokenizers.
    """
    config = resolve_loss(config, student, teacher)
    if isinstance(config, TopKKlConfig):
        if student.table.fingerprint != teacher.table.fingerprint:
            raise ConfigError(
                "loss 'topk_kl': needs one tokenizer on both sides (found student "
                f"{student.table.fingerprint[:12]}, teacher {teacher.table.fingerprint[:12]}). "
                "Use loss 'auto'.",
                key="loss.type",
            )
        return identity_projection(student.table, logit_width=student.logit_width)
    return cache.matrix(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=config.projection if isinstance(config, CtkdConfig) else None,
    )
