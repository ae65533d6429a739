"""Comparisons after a likely token of the teacher, inside the student's tokens that continue it.

KL(teacher || student) of a student's token is that of its beginning ``c``, plus the teacher's mass
of ``c`` times that of what follows ``c`` in the token. The teacher's row after ``c`` is in the
score if the completion continues with ``c``, and a ``Lookahead`` otherwise: so each sample has the
second term, with the weight of the teacher's mass (of the student's for a divergence that is an
expectation over the student). So is each row after the tokens that the teacher is sure of next,
as long as a token of the student continues them: together, all of that token.

After a lookahead, all student's tokens that begin with ``c`` are compared, given ``c``. Each
belongs to the cell of the longest of the teacher's candidates that it begins with, cut as usual
(``cuts``), and that does not except it (``separate_tokens``). The token ``c`` itself, after which
something else follows, belongs to the rest, and so does what the teacher continues with in no
token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.cells import BOUNDED_SHARE
from mopd_losses.prefix.lookaheads.joined_targets import joined
from mopd_losses.prefix.lookaheads.open_tokens import OpenToken, OpenTokens
from mopd_losses.prefix.lookaheads.whole_tokens import WholeToken, are_written, whole_token
from mopd_losses.prefix.naming.separate_tokens import Place
from mopd_losses.prefix.pair import TokenizerPair
from mopd_losses.prefix.targets import NO_PATH, PrefixTargets, RangeReadings
from mopd_losses.prefix.unknown_mass import other_texts
from mopd_losses.prefix.vocabulary.hashed_strings import string_hashes
from mopd_losses.prefix.vocabulary.marks import UNMARKED
from mopd_losses.prefix.vocabulary.shorter_tokens import TRIED
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

_Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class _Comparison:
    """One boundary after an open token."""

    position: int
    known: _Ranges  # ranks of the student's tokens that begin with the open token's text
    cells: list[tuple[float, _Ranges, float]]
    """The teacher's nats, ranks, and nats of the teacher's mass for which the student may write a
    shorter token: `au|w`, although `auw` begins a token."""
    nats: float  # the teacher's, of the open token's text
    shorter: _Ranges  # ranks of these shorter tokens, which are in no cell
    ended: _Ranges
    """Ranks of tokens with which the student writes the open token's text, and that end inside it:
    their mass is unknown."""


@dataclass(frozen=True)
class LookaheadChain:
    """The open tokens of one lookahead, one after another."""

    completion: int  # its number
    tokens: list[OpenToken]
    following: list[TopKLogprobs]  # the teacher's row after each
    whole: WholeToken | None


class LookaheadComparisons:
    """Comparisons after the open tokens of one pair of tokenizers."""

    def __init__(self, pair: TokenizerPair) -> None:
        self.open_tokens = OpenTokens(pair)
        self._pair = pair

    def chains(self, pairs: Sequence[AlignedPair]) -> list[LookaheadChain]:
        """Find the open tokens of all lookaheads, in the order of completions."""
        chains: list[LookaheadChain] = []
        for number, pair in enumerate(pairs):
            lookaheads = {each.teacher_row: each for each in pair.lookaheads or ()}
            if not lookaheads:
                continue
            sides = pair.student, pair.score, pair.alignment
            for token in self.open_tokens.of(*sides, sampled=False, among=lookaheads):
                lookahead = lookaheads[token.teacher_row]
                following = lookahead.following
                tokens = [token, *self.open_tokens.followed(token, lookahead.token_ids, following)]
                rows = [following.rows(row, row + 1) for row in range(len(tokens))]
                whole = whole_token(self._pair, pair.student, tokens[-1], rows[-1])
                chains.append(LookaheadChain(number, tokens, rows, whole))
        return chains

    def added(
        self,
        targets: PrefixTargets,
        pairs: Sequence[AlignedPair],
        offsets: Sequence[int],
        chains: Sequence[LookaheadChain],
        *,
        bounds: bool,
    ) -> PrefixTargets:
        """Add the comparisons of lookaheads to the targets of completions, and mark the boundaries
        after open tokens that the completions continue with.

        Args:
            bounds: see ``Preparation.targets``.
        """
        positions: list[int] = []
        numbers: list[int] = []
        for pair, offset in zip(pairs, offsets, strict=True):
            if pair.lookaheads is None:
                continue
            sides = pair.student, pair.score, pair.alignment
            for token in self.open_tokens.of(*sides, sampled=True):
                assert token.boundary is not None  # of sampled ones
                positions.append(offset + token.student_row)
                numbers.append(token.boundary)
        of_token = torch.tensor(positions, dtype=torch.int64)
        boundaries = torch.searchsorted(targets.positions, of_token)
        boundaries += torch.tensor(numbers, dtype=torch.int64)
        ends = torch.searchsorted(targets.positions, of_token, right=True)
        targets.in_every_sample[boundaries[boundaries < ends]] = True
        comparisons = [
            self._comparison(
                token,
                row,
                offsets[chain.completion],
                pairs[chain.completion].student,
                chain.whole,
                bounds=bounds,
            )
            for chain in chains
            for token, row in zip(chain.tokens, chain.following, strict=True)
            if self.open_tokens.is_open(token.place, token.text)
        ]
        compared = [each for each in comparisons if each is not None]
        return joined(targets, _targets(compared)) if compared else targets

    def _comparison(
        self,
        token: OpenToken,
        following: TopKLogprobs,
        offset: int,
        student: TokenSequence,
        whole: WholeToken | None,
        *,
        bounds: bool,
    ) -> "_Comparison | None":
        """Build a comparison; None if no candidate of the teacher continues within a token."""
        known = self.open_tokens.ranges(token.place, token.text)
        begun = token.place.student + token.text
        rests = {
            rank: self._pair.student.string_at(rank)[len(begun) :]
            for start, stop in known
            for rank in range(start, stop)
        }
        candidates = {
            self._pair.teacher.strings[candidate]: float(nats)
            for candidate, nats in zip(
                following.ids[0].tolist(), following.logprobs[0], strict=True
            )
            if candidate >= 0
        }
        masses: dict[str, float] = {}
        names: dict[str, str] = {}
        lengths = self._pair.cuts.of_candidates(begun, [*candidates])
        for (text, nats), length in zip(candidates.items(), lengths, strict=True):
            name = text[:length]
            if name:
                names[text] = name
                masses[name] = float(np.logaddexp(masses.get(name, -np.inf), nats))
        members = self._members(begun, names, masses, rests)
        named = [name for name in masses if members[name]]
        written = are_written(
            self._pair, student, token.student_row, [begun + name for name in named]
        )
        named = [name for name, is_written in zip(named, written, strict=True) if is_written]
        shorter = {name: list[int]() for name in named}
        if bounds:
            shorter = self._shorter_tokens(begun, named)
        shared = {rank for name in named for rank in shorter[name]}

        def missing(name: str) -> float:
            if not shorter[name] and shared.isdisjoint(members[name]):
                return -np.inf
            if whole is None or whole.rank in shared or whole.rank not in members[name]:
                return 0.0
            return float(other_texts(np.exp(np.asarray(whole.nats - token.nats - masses[name]))))

        cells = [
            (
                masses[name],
                _ranges_of(rank for rank in members[name] if rank not in shared),
                missing(name),
            )
            for name in named
        ]
        if not cells:
            return None
        others = [
            text
            for text, nats in candidates.items()
            if bounds and nats >= np.log(BOUNDED_SHARE) and names.get(text) not in named
        ]
        bounding = _ranges_of(sorted(shared)), _ranges_of(self._ended(begun, others))
        return _Comparison(offset + token.student_row, known, cells, token.nats, *bounding)

    def _members(
        self,
        begun: str,
        names: Mapping[str, str],
        masses: Mapping[str, float],
        rests: Mapping[int, str],
    ) -> dict[str, list[int]]:
        """Return the ranks of the student's tokens in the cell of each name: of the longest one
        that a token begins with, and which its marks do not except. A candidate is in the cell of
        its name, or in that of a longer one.

        Args:
            names: of the candidates.
            masses: of the names, nats.
            rests: rank -> what is after ``begun``, in the order of ranks.
        """
        marks, place = self._pair.marks, Place(begun, "", begun)
        excepted = {
            name: marks.number_of(self._pair.separate.of_cell(place, name))
            for name, nats in masses.items()
            if nats >= np.log(BOUNDED_SHARE)
        }

        def cell_of(text: str) -> str:
            beginnings = (text[:length] for length in range(len(text), 0, -1))
            of_names = (name for name in beginnings if name in masses)
            return next((n for n in of_names if marks.belongs(excepted.get(n, UNMARKED), text)), "")

        for text, name in names.items():
            if len(cell_of(text)) < len(name):
                excepted[name] = marks.with_mark(excepted[name], text, True)
        members: dict[str, list[int]] = {name: [] for name in masses}
        for rank, text in rests.items():
            if cell := cell_of(text):
                members[cell].append(rank)
        return members

    def _ended(self, begun: str, others: Sequence[str]) -> list[int]:
        """Return the ranks of the tokens, shorter than what is begun, with which the student's
        tokenizer begins in front of texts that no cell contains."""
        texts: list[str] = []
        for whole in (begun + each for each in others):
            is_text = utf8_text(whole) is not None
            texts += [whole] if is_text else self._pair.student.completed(whole, TRIED)
        ends = self._pair.student_canonical.first_ends(texts).tolist()
        tokens = {text[:end] for text, end in zip(texts, ends, strict=True) if end < len(begun)}
        ranges = (self._pair.student.range_of(token) for token in tokens - {""})
        return sorted(rank for each in ranges for rank in range(each.start, each.longer))

    def _shorter_tokens(self, begun: str, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the ranks of the tokens that the student may write in place of one that spells
        what is begun and a name, by what follows: not shorter than what is begun."""
        full_texts = [begun + name for name in names]
        shorter, student = self._pair.student_tokenizations.shorter, self._pair.student
        bits = shorter.of(string_hashes(full_texts), lambda index: full_texts[index]).tolist()
        return {
            name: [
                rank
                for length in range(len(begun), len(whole))
                if lengths >> length & 1
                for tokens in [student.range_of(whole[:length])]
                for rank in range(tokens.start, tokens.longer)
            ]
            for name, whole, lengths in zip(names, full_texts, bits, strict=True)
        }


def _ranges_of(ranks: Iterable[int]) -> _Ranges:
    """Join ascending ranks to ranges."""
    ranges: _Ranges = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank:
            ranges[-1] = ranges[-1][0], rank + 1
        else:
            ranges.append((rank, rank + 1))
    return ranges


def _targets(comparisons: Sequence[_Comparison]) -> PrefixTargets:
    count = len(comparisons)
    cells = torch.full((count, max(len(each.cells) for each in comparisons)), -torch.inf).double()
    for row, each in enumerate(comparisons):
        cells[row, : len(each.cells)] = torch.tensor([nats for nats, _, _ in each.cells]).double()
    named = [
        (row, column, each.position, start, stop)
        for row, each in enumerate(comparisons)
        for column, (_, ranges, _) in enumerate(each.cells)
        for start, stop in ranges
    ]
    known = [
        (row, 0, each.position, start, stop)
        for row, each in enumerate(comparisons)
        for start, stop in each.known
    ]
    missing = torch.full_like(cells, -torch.inf)
    divided: list[tuple[int, int, int, int, int]] = []
    for row, each in enumerate(comparisons):
        missing[row, : len(each.cells)] = torch.tensor([nats for _, _, nats in each.cells])
        # Mass of what is open.
        divided += [(row, 1, each.position, start, stop) for start, stop in each.shorter]
        divided += [(row, 0, each.position, start, stop) for start, stop in each.ended]
    positions = torch.tensor([each.position for each in comparisons])
    none, no_nats = torch.empty(0, dtype=torch.int64), torch.full((count,), -torch.inf).double()
    return PrefixTargets(
        positions=positions,
        first_positions=positions,
        cells=cells,
        rests=(1 - cells.exp().sum(dim=1)).clamp_min(0).log(),
        path_masses=torch.ones(count).double(),
        token_masses=torch.tensor([each.nats for each in comparisons]).double(),
        in_every_sample=torch.ones(count, dtype=torch.bool),
        weights=torch.ones(count).double(),
        named=_readings(named),
        known=_readings(known),
        bounding=_readings(divided),
        missing=missing,
        ends=torch.zeros_like(cells, dtype=torch.bool),
        teacher_bounds=no_nats,
        teacher_missing=torch.zeros_like(cells, dtype=torch.bool),
        path_boundaries=none,
        step_paths=none,
        step_positions=none,
        step_ids=none,
    )


def _readings(columns: Sequence[tuple[int, int, int, int, int]]) -> RangeReadings:
    table = torch.tensor(columns, dtype=torch.int64).reshape(-1, 5).T.contiguous()
    return RangeReadings(*table, paths=torch.full((len(columns),), NO_PATH))
