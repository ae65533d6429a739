"""Pairs of tiny vocabularies that write by longest match, and completions scored in float64."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import PrefixKlConfig
from mopd_losses.core.loss import AlignedPair, Lookahead, LossOutput
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.prefix.loss import PrefixKlLoss
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.preparation import Preparation
from mopd_losses.prefix.targets import PrefixTargets
from mopd_protocol.tokenizers.joined_texts import TextTokens
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TokenRoles, TokenTable
from tests.losses.families import Family, family_of, made_of
from tests.reference import prefix_kl as slow
from tests.reference.text_model import END, TokenModel

#: The character that stands for the end of a turn in the slow reference.
END_CHARACTER = "\u2588"


class LongestMatch:
    """Writes text with the longest token that fits, again and again: a ``TextEncoder``."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.ids = {spelled: at for at, spelled in enumerate(table.all_bytes) if spelled}
        self._longest = max(map(len, self.ids))
        self.merges = np.zeros((0, 3), dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode())

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes, half characters too."""
        ids: list[int] = []
        while data:
            end = next(
                n for n in range(self._longest, 0, -1) if data[:n] in self.ids and n <= len(data)
            )
            ids.append(self.ids[data[:end]])
            data = data[end:]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> TextTokens:
        encoded = self.encode_batch(texts)
        ids = np.array([token for each in encoded for token in each], dtype=np.int64)
        return TextTokens(ids, np.array(list(map(len, encoded)), dtype=np.int64))


#: Parts of characters are tokens too.
_BYTES = "utf-8", "surrogateescape"


@dataclass(frozen=True, eq=False)
class ExactTopK:
    """``TopKLogprobs`` that are not rounded to float32."""

    ids: np.ndarray
    logprobs: np.ndarray
    token_logprobs: np.ndarray
    tail_logprobs: np.ndarray
    token_ranks: None = None

    @property
    def k(self) -> int:
        return self.ids.shape[1]

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int) -> "ExactTopK":
        columns = self.ids, self.logprobs, self.token_logprobs, self.tail_logprobs
        return ExactTopK(*(column[start:stop] for column in columns))


@dataclass(frozen=True, eq=False)
class ExactScore:
    """``TeacherScore`` with such a top-k."""

    completion: TokenSequence
    topk: ExactTopK


@dataclass(frozen=True, eq=False)
class Tongue:
    """A vocabulary and how it writes."""

    family: Family
    encoder: Any

    @classmethod
    @cache
    def of(
        cls,
        *spellings: str,
        end: str = "<end>",
        by_merges: bool = False,
        without_merges: bool = False,
    ) -> "Tongue":
        family = made_of(*spellings, end=end, without_merges=without_merges)
        return cls(family, family.encoder if by_merges else LongestMatch(family.table))

    @classmethod
    def ended(cls, tokenizer: Tokenizer, end: str) -> "Tongue":
        """Add an end of the turn to a tokenizer."""
        tokenizer.add_special_tokens([end])
        end_id = tokenizer.token_to_id(end)
        family = family_of(tokenizer, TokenRoles(eos=end_id, end_of_turn=end_id))
        return cls(family, family.encoder)

    @property
    def table(self) -> TokenTable:
        """The tokens of the vocabulary."""
        return self.family.table

    @property
    def logit_width(self) -> int:
        """Rows of a head with padding."""
        return self.family.logit_width

    @property
    def end(self) -> int:
        end = self.family.table.roles.end_of_turn
        assert end is not None
        return end

    def ids(self, pieces: Sequence[str]) -> list[int]:
        """Ids of tokens given by their spelling; ``END`` for the end of the turn."""
        return [self.end if p == END else self._ids[p.encode(*_BYTES)] for p in pieces]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ids by spelling: of two, the one that the tokenizer writes."""
        ids = {spelled: token for token, spelled in enumerate(self.table.all_bytes)}
        counts = Counter(filter(None, self.table.all_bytes))
        for spelled in (spelled for spelled, count in counts.items() if count > 1):
            with suppress(UnicodeDecodeError):
                written = self.encode_bytes(spelled.decode().encode())
                ids[spelled] = written[0] if len(written) == 1 else ids[spelled]
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of bytes; half characters only by longest match."""
        if isinstance(self.encoder, LongestMatch):
            return self.encoder.encode_bytes(data)
        return self.encoder.encode(data.decode())

    def tokenize(self, text: str) -> list[str]:
        """The canonical tokens of a text."""
        return [self.table.bytes_of(i).decode(*_BYTES) for i in self.encoder.encode(text)]

    def side(
        self,
        ids: Sequence[int],
        logprobs: Tensor,
        kept: list[list[int]],
    ) -> slow.Side:
        """The same for the slow reference; ``logprobs`` [tokens, width], of the ``kept`` ids."""
        tokens = {i: b.decode("latin-1") for i, b in enumerate(self.table.all_bytes) if b}
        tokens[self.end] = END_CHARACTER
        rows = logprobs.exp().tolist()
        return slow.Side(
            tokens=tokens,
            sampled=[int(token) for token in ids],
            rows=[{i: row[i] for i in known} for row, known in zip(rows, kept, strict=True)],
            sampled_probabilities=[row[int(token)] for row, token in zip(rows, ids, strict=True)],
            encode=lambda text: [tokens[i] for i in self.encode_bytes(text.encode("latin-1"))],
        )


@dataclass(frozen=True, eq=False)
class Pair:
    """A student's and a teacher's vocabulary."""

    student: Tongue
    teacher: Tongue

    @cached_property
    def preparation(self) -> Preparation:
        student, teacher = self.student, self.teacher
        sides = student.table, student.encoder, teacher.table, teacher.encoder
        return Preparation(TokenizerPair(*sides))

    @cached_property
    def real_ids(self) -> Tensor:
        family = self.student.family
        return torch.tensor(family.table.real_ids(family.logit_width))

    def loss(self, mass_floor: float = 0.0, **settings: Any) -> PrefixKlLoss:
        return PrefixKlLoss(self.preparation, PrefixKlConfig(mass_floor=mass_floor, **settings))

    def targets(
        self, comparisons: Sequence[AlignedPair], offsets: Sequence[int] = (0,), **settings: Any
    ) -> PrefixTargets:
        return self.loss(**settings).targets(comparisons, offsets)

    def value(self, logits: Tensor, targets: PrefixTargets, **settings: Any) -> LossOutput:
        return self.loss(**settings)(DenseRows(logits, self.real_ids), targets)


def compared(
    pair: Pair,
    student_ids: Sequence[int],
    teacher_ids: Sequence[int],
    teacher_logprobs: Tensor,
    k: int,
) -> AlignedPair:
    """One completion; ``teacher_logprobs`` [tokens, width] is cut to its ``k`` likeliest."""
    student = pair.student.family.table.sequence(list(student_ids))
    teacher = pair.teacher.family.table.sequence(list(teacher_ids))
    values, ids = teacher_logprobs.topk(k, dim=1)
    ids = ids.masked_fill(values.isneginf(), -1)
    tails = teacher_logprobs.scatter(1, ids.clamp_min(0), -torch.inf).logsumexp(dim=1)
    rows = torch.arange(len(teacher))
    score: Any = ExactScore(
        teacher,
        ExactTopK(
            ids.numpy(),
            values.numpy(),
            teacher_logprobs[rows, torch.tensor(list(teacher_ids), dtype=torch.int64)].numpy(),
            tails.numpy(),
        ),
    )
    sampled = np.zeros(len(student), dtype=np.float32)
    return AlignedPair(student, sampled, score, align(student, teacher))


def with_lookaheads(
    pair: Pair, comparison: AlignedPair, row: Callable[[list[int]], Tensor]
) -> AlignedPair:
    """Add all lookaheads, each up to the end of the student's longest token that continues it.

    Args:
        row: the teacher's after some tokens: [width], nats.
    """
    lookaheads: list[Lookahead] = []
    score = comparison.score
    sides = comparison.student, score, comparison.alignment
    open_tokens = pair.preparation.lookaheads.open_tokens
    strings = pair.preparation.student.strings
    longest = sorted(range(len(strings)), key=lambda token: -len(strings[token]))
    for token in open_tokens.of(*sides, sampled=False):
        likely = int(score.topk.ids[token.teacher_row, 0])
        before = score.completion.token_ids[: token.teacher_row].tolist()
        text = open_tokens.text_of(comparison.student, token, longest)
        if text is None:
            continue  # part of a character, which cannot be sent
        teacher_ids = pair.teacher.ids(pair.teacher.tokenize(text))
        if teacher_ids[: len(before) + 1] != [*before, likely]:
            teacher_ids = [*before, likely]
        behind, rows = list[int](), [row([*before, likely])]
        for following in teacher_ids[len(before) + 1 :]:
            if rows[-1][following].isneginf():
                break  # a text that the model does not have
            behind.append(following)
            rows.append(row([*before, likely, *behind]))
        ended = [*behind, int(rows[-1].argmax())]
        scored = compared(pair, [], ended, torch.stack(rows), score.topk.k)
        topk = scored.score.topk
        count = len(open_tokens.followed(token, behind, topk))
        lookaheads.append(
            Lookahead(
                token.student_row, token.teacher_row, topk.rows(0, count + 1), tuple(behind[:count])
            )
        )
    return replace(comparison, lookaheads=tuple(lookaheads))


def model_rows(tongue: Tongue, model: TokenModel, text: str) -> Tensor:
    """[tokens, width], ln of the exact token rows of a byte model on one of its texts."""
    written = model.written[text]
    rows = torch.full((len(written), tongue.family.logit_width), -torch.inf, dtype=torch.float64)
    for at, row in enumerate(rows):
        following = model.row(written[:at])
        row[tongue.ids(list(following))] = torch.tensor(
            list(following.values()), dtype=torch.float64
        ).log()
    return rows


def rows_of(tongue: Tongue, model: TokenModel) -> Callable[[list[int]], Tensor]:
    """ln of the model's row after some tokens: [width]."""

    def row(ids: list[int]) -> Tensor:
        following = model.row([tongue.table.bytes_of(token).decode(*_BYTES) for token in ids])
        logprobs = torch.full((tongue.logit_width,), -torch.inf, dtype=torch.float64)
        logprobs[tongue.ids([*following])] = torch.tensor([*following.values()]).double().log()
        return logprobs

    return row


def prefix_closed(draw: random.Random, letters: str, words: int, longest: int) -> list[str]:
    """Random spellings of two letters and more, each with all that it begins with."""
    drawn = ["".join(draw.choices(letters, k=draw.randint(2, longest))) for _ in range(words)]
    prefixes = {word[:end] for word in drawn for end in range(2, len(word) + 1)}
    return sorted(prefixes, key=lambda word: (len(word), word))


@dataclass(frozen=True, eq=False)
class Completion:
    """Two unrelated models on one text."""

    pair: Pair
    logits: Tensor  # [student tokens, width]
    comparison: AlignedPair


#: Random pairs are drawn from this many, which are made once.
PAIRS = 16


@cache
def random_pair(seed: int, letters: str = "ab") -> Pair:
    """Any two vocabularies that write by longest match."""
    draw = random.Random(seed)
    return Pair(
        *(
            Tongue.of(*prefix_closed(draw, letters, draw.randint(0, 3), 3), end=end)
            for end in ("<over>", "<stop>")
        )
    )


@cache
def gapped_pair(seed: int, letters: str = "ab") -> Pair:
    """The same with long tokens that no shorter one leads to."""
    draw = random.Random(seed)

    def words() -> list[str]:
        return ["".join(draw.choices(letters, k=draw.randint(2, 4))) for _ in range(3)]

    return Pair(
        *(Tongue.of(*sorted({*words()}), end=e, without_merges=True) for e in ("<over>", "<stop>"))
    )


def random_completion(seed: int, letters: str = "ab", pair: Pair | None = None) -> Completion:
    """Any vocabularies, any cuts of the student's, a teacher that scores this or another text."""
    if pair is None:
        pair = (random_pair if seed // PAIRS % 2 else gapped_pair)(seed % PAIRS, letters)
    tongues = [pair.student, pair.teacher]
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spelled = [
        b
        for b in tongues[0].family.table.all_bytes
        if b and set(b.decode("latin-1")) <= set(letters)
    ]
    pieces = [draw.choice(spelled).decode() for _ in range(draw.randint(0, 5))]
    text = "".join(pieces)
    ended = [END] if draw.random() < 0.7 else []
    read = (
        text
        if draw.random() < 0.8
        else text[: draw.randint(0, len(text))] + "".join(draw.choices(letters, k=2))
    )
    student_ids = tongues[0].ids([*pieces, *ended])
    teacher_ids = tongues[1].ids([*tongues[1].tokenize(read), *ended])
    scale = draw.choice([1.0, 3.0])
    letter_ids = [  # tokens of the text's letters; all others are unlikely
        tongue.ids(
            [
                *(
                    b.decode()
                    for b in tongue.family.table.all_bytes
                    if b and set(b.decode("latin-1")) <= set(letters)
                ),
                END,
            ]
        )
        for tongue in tongues
    ]
    rows = []
    for tongue, ids, likely in zip(tongues, (student_ids, teacher_ids), letter_ids, strict=True):
        logits = torch.randn(len(ids), tongue.family.logit_width, dtype=torch.float64) - 8
        logits[:, likely] += 8 + scale * torch.randn(len(ids), len(likely), dtype=torch.float64)
        rows.append(logits)
    real = torch.tensor(tongues[1].family.table.real_ids(tongues[1].family.logit_width))
    logprobs = rows[1].masked_fill(~real, -torch.inf).log_softmax(dim=1)
    comparison = compared(pair, student_ids, teacher_ids, logprobs, k=draw.choice([1, 3, 6]))
    return Completion(pair, rows[0], comparison)
