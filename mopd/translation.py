"""Translate a teacher's scores into the ids of a student."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_losses import ExtraRow, Translation, Translator
from mopd_protocol import TeacherScore, TopKLogprobs
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

#: Extra rows depend on each other: of a word of many tokens, the second follows the first.
_MOST_ROUNDS = 8


class LoadedTokenizer(Protocol):
    """A tokenizer's table and encoder, such as ``TeacherClient.tokenizer`` returns."""

    @property
    def table(self) -> TokenTable: ...

    @property
    def encoder(self) -> TextEncoder: ...


def translate(
    scores: Sequence[TeacherScore],
    completions: Sequence[Sequence[int]],
    *,
    student: str | LoadedTokenizer,
    teacher: str | LoadedTokenizer,
    request_rows: Callable[[Sequence[ExtraRow]], Sequence[TopKLogprobs]] | None = None,
) -> list[Translation]:
    """Return a teacher's distributions over the student's next tokens, for each completion.

    For pairs of tokenizers that share most words: a word that is one token of the student and
    several of the teacher needs extra rows, and what remains undecided is in the tail. Losses of
    ``mopd train`` compare such text exactly. A loss on translations must have a tail: one that
    renormalises the entries, or sums over them only, is minimal elsewhere than at the teacher.

    Args:
        scores: of the completions' texts.
        completions: token ids of the student, as sampled, an ending token included.
        student: folder, hub id or loaded tokenizer.
        teacher: the same of the teacher's.
        request_rows: scores a batch of extra rows, one ``TopKLogprobs`` of one row each, in order;
            without, text that needs one is in the tail.

    Raises:
        ConfigError: if a tokenizer is not found or has no fast form.
        DataError: if the numbers of scores and completions differ, or an id has no token.
    """
    if len(scores) != len(completions):
        raise DataError(
            f"scores and completions differ in number (found {len(scores)} and "
            f"{len(completions)}). Pass one completion for each score.",
            key="completions",
        )
    own, other = (load_tokenizer(t) if isinstance(t, str) else t for t in (student, teacher))
    translator = Translator(own.table, own.encoder, other.table, other.encoder)
    sequences = [own.table.sequence(list(ids)) for ids in completions]
    pending = translator.begin(sequences, scores)
    for _ in range(_MOST_ROUNDS if request_rows else 0):
        missing = pending.extra_rows
        if not missing or request_rows is None:
            break
        pending.add(dict(zip(missing, request_rows(missing), strict=True)))
    return pending.translations()
