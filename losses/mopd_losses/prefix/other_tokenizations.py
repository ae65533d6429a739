"""``OtherTokenizations``: the tokens that bound what is missing of a cell.

The rows of a completion give the mass of text over the sampled tokens. A tokenizer that does not
match the longest token may divide the text before a boundary differently once a cell follows:
``bb`` is one token, but ``bba`` is ``b|ba``. A side that produced ``bb`` never continues with
``a``: that mass is part of its token ``b``, one row earlier, and what would follow ``b`` is in a
row that was not computed. The bounding token of the cell is that row and token; its mass is an
upper bound of what is missing of the cell.
"""

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_strings import utf8_text
from mopd_losses.prefix.bounding_tokens import BoundingTokens, Searched
from mopd_losses.prefix.canonical_tokens import CACHED, CanonicalTokens
from mopd_losses.prefix.naming.separate_tokens import WORDS, continuations
from mopd_losses.prefix.probes import Probes
from mopd_losses.prefix.shorter_tokenizations import ShorterTokenizations
from mopd_losses.prefix.text.contexts import Contexts, TextsBefore
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import (
    Integers,
    keys_of,
)
from mopd_losses.prefix.vocabulary.key_table import KeyTable
from mopd_losses.prefix.vocabulary.marks import MarksTable
from mopd_losses.prefix.vocabulary.merges import Merges
from mopd_losses.prefix.vocabulary.shorter_tokens import TRIED, ShorterTokens
from mopd_losses.prefix.vocabulary.sorted_vocabulary import SortedVocabulary
from mopd_losses.prefix.vocabulary.spellings import Spellings, written_ids
from mopd_protocol.tokenizers.token_table import TextEncoder

#: The bounding token of a cell that is reached over the sampled tokens.
_NO_TOKEN = 0

#: The last character that is a byte; control tokens are above.
_HIGHEST_BYTE = chr(0xFF)

#: A bounding token is ``1 + flag + 2 * (steps + _STEPS * token)``, with the flag of counted tokens.
_STEPS = 8

Flags = NDArray[np.bool_]

#: The boundaries of tokens, the sampled tokens of the context before each, their ids, and whether
#: each is counted.
_Found = tuple[Integers, Integers, Integers, Flags]


class OtherTokenizations:
    """Finds the bounding tokens of one side, by its tokenizer."""

    def __init__(
        self,
        vocabulary: SortedVocabulary,
        encoder: TextEncoder,
        merges: Merges,
        marks: MarksTable,
        canonical: CanonicalTokens,
    ) -> None:
        self._vocabulary = vocabulary
        self._merges = merges
        self._marks = marks
        self._encoder = encoder
        self.table = KeyTable(CACHED)
        self.divided = KeyTable(CACHED)
        self.probed = KeyTable(CACHED)
        self.joined = KeyTable(CACHED)
        self.shorter = ShorterTokens(vocabulary, encoder, merges)
        self._written = written_ids(vocabulary, encoder)
        self._shorter = ShorterTokenizations(vocabulary, self.shorter, canonical.are_canonical)
        self._canonical = canonical

    def of(
        self, contexts: Contexts, searched: Searched, marks: Integers, probes: Probes | None = None
    ) -> BoundingTokens:
        """Find those of likely cells, and of candidates and probes that are in the rest.

        Args:
            marks: [cells], numbers.
        """
        may_differ = contexts.may_cross(searched.boundaries, searched.texts)
        may_differ |= contexts.are_several(searched.boundaries, searched.texts)
        redivided = contexts.end_with_run | contexts.inside_tokens
        may_differ |= redivided[searched.boundaries] & searched.texts.are_text()
        possible = np.flatnonzero(may_differ)
        numbers = searched.boundaries[possible]
        texts = searched.texts.at(possible)
        codes = self._codes(contexts, numbers, texts)
        whole = (codes == _NO_TOKEN) & (searched.cells[possible] >= 0) & texts.are_text()
        whole = np.flatnonzero(whole) if len(self._merges) else np.empty(0, dtype=np.int64)
        of_cells = marks[searched.cells[possible[whole]]]
        codes[whole] = self._divided(contexts, numbers[whole], texts.at(whole), of_cells)
        rest = np.flatnonzero((searched.cells[possible] < 0) & texts.are_text())
        joined = self._joined(contexts, numbers[rest], texts.at(rest))
        possible, numbers = (np.append(each, each[rest]) for each in (possible, numbers))
        codes = np.append(codes, joined)
        counted = codes & 1 == 0  # one more than the flag
        # A counted token is mass of the rest, and so is a candidate that is in no cell.
        kept = np.flatnonzero((codes != _NO_TOKEN) & ~((searched.cells[possible] < 0) & counted))
        kept = kept[self._canonical.are_canonical(contexts, numbers[kept])]
        steps, ids = _steps_and_ids(codes[kept])
        at = np.flatnonzero((searched.cells >= 0) & searched.texts.are_text())
        searched_texts = searched.boundaries[at], searched.texts.at(at)
        others, other_rows, other_ids = self._shorter.of_cells(contexts, *searched_texts)
        earlier, earlier_rows, earlier_ids = self._shorter.before_cells(contexts, *searched_texts)
        others, earlier = at[others], at[earlier]
        of_others, of_earlier = searched.boundaries[others], searched.boundaries[earlier]
        other_steps = other_rows - contexts.first_rows[of_others]
        earlier_steps = earlier_rows - contexts.first_rows[of_earlier]
        columns = [
            (searched.cells[possible[kept]], (numbers[kept], steps, ids, counted[kept])),
            (searched.cells[others], (of_others, other_steps, other_ids, _all(others, True))),
            (
                searched.cells[earlier],
                (of_earlier, earlier_steps, earlier_ids, _all(earlier, False)),
            ),
        ]
        if probes is not None:
            of_rest = self._of_probes(contexts, probes)
            columns.append((np.full(len(of_rest[0]), -1), of_rest))
        numbers, steps, ids, counted = map(
            np.concatenate, zip(*(each for _, each in columns), strict=True)
        )
        with_cell = np.concatenate([each for each, _ in columns])
        ids = self._written[ids]
        rows = contexts.first_rows[numbers] + steps
        reached = np.zeros(len(marks), dtype=np.bool_)
        reached[with_cell[with_cell >= 0]] = True
        order = (numbers * _STEPS + steps) * len(self._vocabulary.strings) + ids
        _, first = np.unique(order, return_index=True)
        return BoundingTokens(reached, numbers[first], rows[first], ids[first], counted[first])

    def end_a_token(self, contexts: Contexts, boundaries: Integers, texts: Strings) -> Flags:
        """Return whether a boundary is inside a sampled token, and a shorter token ends at the
        boundary if it is followed by a text, and by any other text after that one."""
        rows = contexts.places.open_rows
        begun = rows.begun[rows.last]
        at = np.flatnonzero(contexts.inside_tokens[boundaries])
        inside = texts.at(at)
        divided = ~(inside.are_text() & contexts.may_cross(boundaries[at], inside))
        at, inside = at[divided], inside.at(divided)
        numbers = boundaries[at]
        # No token is in both, so only white space is divided by the text after it.
        followed = inside.where(contexts.end_with_space(numbers))
        codes = self._codes(contexts, numbers, followed)
        lengths = self._vocabulary.lengths[_steps_and_ids(codes)[1]]
        counted = (codes != _NO_TOKEN) & (codes & 1 == 0)
        ends = np.flatnonzero(counted & (lengths == begun[numbers]))
        results = np.zeros(len(boundaries), dtype=np.bool_)
        results[at[ends]] = self._canonical.are_canonical(contexts, numbers[ends])
        return results

    def _codes(self, contexts: Contexts, boundaries: Integers, texts: Strings) -> Integers:
        """Return the bounding token of each text after a boundary."""

        def compute(indices: Integers) -> Integers:
            return self._others(contexts, boundaries[indices], texts.strings(indices))

        return self.table.computed(keys_of(contexts.keys[boundaries], texts.hashes), compute)

    def _divided(
        self, contexts: Contexts, boundaries: Integers, texts: Strings, marks: Integers
    ) -> Integers:
        """Return the bounding token of each text after a boundary once more follows that divides
        its last token, and that is in its cell: ``5|73``, but ``57|379``."""

        def compute(indices: Integers) -> Integers:
            own, strings = boundaries[indices], texts.strings(indices)
            begun = contexts.texts(own)
            full_texts = [first + second for first, second in zip(begun, strings, strict=True)]
            last = Spellings.of(self._vocabulary, self._encoder, full_texts).last_tokens()
            continued = [
                (index, full_texts[index] + after)
                for index, (token, number) in enumerate(
                    zip(last.tolist(), marks[indices].tolist(), strict=True)
                )
                if token >= 0
                for after in self._merges.dividing(token)
                if self._marks.belongs(number, strings[index] + after)
            ]
            owners = np.array([index for index, _ in continued], dtype=np.int64)
            limits = np.array(list(map(len, full_texts)), dtype=np.int64)[owners]
            codes, _, _ = self._first_others(
                contexts, own[owners], [text for _, text in continued], limits
            )
            return _first_of(codes, owners, len(indices))

        keys = keys_of(contexts.keys[boundaries], texts.hashes, self._marks.hashes(marks))
        return self.divided.computed(keys, compute)

    def _joined(self, contexts: Contexts, boundaries: Integers, texts: Strings) -> Integers:
        """Return the bounding token of each text once more follows that a token may join with its
        end: one that ends at or before the boundary."""

        def compute(indices: Integers) -> Integers:
            own = boundaries[indices]
            pairs = zip(contexts.texts(own), texts.strings(indices), strict=True)
            continued = [
                (index, begun + string + after)
                for index, (begun, string) in enumerate(pairs)
                for after in continuations(self._vocabulary, begun + string, 1)
            ]
            owners = np.array([index for index, _ in continued], dtype=np.int64)
            codes, _, _ = self._first_others(
                contexts,
                own[owners],
                [text for _, text in continued],
                contexts.lengths[own[owners]],
            )
            return _commonest_of(codes, owners, len(indices))

        keys = keys_of(contexts.keys[boundaries], texts.hashes)
        return self.joined.computed(keys, compute)

    def _of_probes(self, contexts: Contexts, probes: Probes) -> _Found:
        """Find bounding tokens of probes that are in the rest. Continuations after probes would be
        most of the calls, and find nothing that the other strings do not show."""
        before = contexts.beginning_at(probes.boundaries, probes.rows)

        def compute(indices: Integers) -> Integers:
            strings = probes.texts.strings(indices)
            texts = [a + b for a, b in zip(before.texts(indices), strings, strict=True)]
            lengths = before.lengths[indices] + probes.texts.lengths[indices]
            continued = [
                (number, each)
                for number, text in enumerate(texts)
                for each in self._completed(text)
            ]
            owners = np.array([number for number, _ in continued], dtype=np.int64)
            codes, _, _ = self._first_others(
                before, indices[owners], [text for _, text in continued], lengths[owners]
            )
            return _commonest_of(codes, owners, len(indices))

        codes = self.probed.computed(keys_of(before.keys, probes.texts.hashes), compute)
        kept = np.flatnonzero(codes & 1 == 1)  # a counted token is mass of the rest
        kept = kept[self._canonical.are_canonical(before, kept)]
        numbers = probes.boundaries[kept]
        canonical = self._canonical.are_canonical(contexts, numbers)
        kept, numbers = kept[canonical], numbers[canonical]
        steps, ids = _steps_and_ids(codes[kept])
        steps += probes.rows[kept] - contexts.first_rows[numbers]
        return numbers, steps, ids, np.zeros(len(kept), dtype=np.bool_)

    def _completed(self, text: str) -> list[str]:
        """Return a text; of one that ends inside a character what may become of it."""
        is_text = text.isascii() or utf8_text(text) is not None
        return [text] if is_text else self._vocabulary.completed(text, TRIED)

    def _others(self, contexts: TextsBefore, boundaries: Integers, strings: list[str]) -> Integers:
        """Find the first token to each string that is neither sampled nor known mass of it; if
        there is none, the commonest of those that end at or before the boundary once the string
        continues."""
        before = contexts.lengths[boundaries]
        begun = contexts.texts(boundaries)
        full_texts = [first + second for first, second in zip(begun, strings, strict=True)]
        # A control token is never merged with the text before it.
        texts = [
            whole if whole[-1] <= _HIGHEST_BYTE else whole[:length]
            for whole, length in zip(full_texts, before.tolist(), strict=True)
        ]
        lengths = np.array(list(map(len, full_texts)), dtype=np.int64)
        results, is_one, is_text = self._first_others(contexts, boundaries, texts, lengths)
        # The last character of white space may belong to the next word.
        continued = [
            (index, text + after)
            for index in np.flatnonzero(results == _NO_TOKEN).tolist()
            if (text := texts[index])[-1:].isspace()
            and text.isascii()
            and text == full_texts[index]
            for after in WORDS
        ]
        # A token may complete a character of which the text is only the first bytes.
        for index in np.flatnonzero(~is_text).tolist():
            if (text := texts[index]) == full_texts[index]:
                continued += [(index, each) for each in self._vocabulary.completed(text, TRIED)]
        # A string may be one token, and no longer one once more follows: `bb`, but `b|ba`.
        continued += [
            (index, texts[index] + after)
            for index in np.flatnonzero(is_one).tolist()
            for after in continuations(self._vocabulary, texts[index], 1)
        ]
        owners = np.array([index for index, _ in continued], dtype=np.int64)
        limits = np.where(is_text, before, lengths)[owners]
        after_more, _, _ = self._first_others(
            contexts, boundaries[owners], [text for _, text in continued], limits
        )
        return np.where(results, results, _commonest_of(after_more, owners, len(results)))

    def _first_others(
        self, contexts: TextsBefore, boundaries: Integers, texts: list[str], limits: Integers
    ) -> tuple[Integers, Flags, Flags]:
        """Find the first token of each text after a context that is not sampled; none that ends
        beyond the boundary and at the limit or after it. Also return whether such a one begins
        before the boundary, and whether it is a text."""
        text, before = contexts.text, contexts.lengths[boundaries]
        spelled = Spellings.of(self._vocabulary, self._encoder, texts)
        owners, steps = spelled.owners, spelled.steps
        rows = contexts.first_rows[boundaries][owners] + steps
        is_beyond = spelled.ends > before[owners]
        other = text.ids[np.minimum(rows, len(text.ids) - 1)] != spelled.ids
        at = np.flatnonzero(is_beyond | other)
        reached, first = np.unique(owners[at], return_index=True)
        at = at[first]
        # A token that ends with the string, or after it, is known mass of it.
        kept = ~is_beyond[at] | (spelled.ends[at] < limits[reached])
        begins = spelled.ends[at] - self._vocabulary.lengths[spelled.ids[at]]
        is_one = np.zeros(len(texts), dtype=np.bool_)
        is_one[reached[~kept & (begins < before[reached])]] = True
        at, reached = at[kept], reached[kept]
        ends_open_row = spelled.ends[at] == before[reached]
        ends_open_row &= rows[at] == contexts.covering_rows[boundaries[reached]]
        counted = is_beyond[at] | ends_open_row
        results = np.full(len(texts), _NO_TOKEN, dtype=np.int64)
        results[reached] = 1 + counted + 2 * (steps[at] + _STEPS * spelled.ids[at])
        return results, is_one, spelled.is_text


def _all(indices: Integers, value: bool) -> Flags:
    return np.full(len(indices), value)


def _first_of(codes: Integers, owners: Integers, count: int) -> Integers:
    """[count], the first bounding token of each owner."""
    at = np.flatnonzero(codes != _NO_TOKEN)
    reached, first = np.unique(owners[at], return_index=True)
    results = np.full(count, _NO_TOKEN, dtype=np.int64)
    results[reached] = codes[at[first]]
    return results


def _commonest_of(codes: Integers, owners: Integers, count: int) -> Integers:
    """[count], the bounding token that each owner has most often; of several, the first."""
    at = np.flatnonzero(codes != _NO_TOKEN)
    at = at[np.lexsort((codes[at], owners[at]))]
    is_first = np.ones(len(at), dtype=np.bool_)
    is_first[1:] = (owners[at[1:]] != owners[at[:-1]]) | (codes[at[1:]] != codes[at[:-1]])
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, len(at)))
    at = at[starts]
    order = np.lexsort((at, -counts))
    return _first_of(codes[at[order]], owners[at[order]], count)


def _steps_and_ids(codes: Integers) -> tuple[Integers, Integers]:
    """Return the sampled tokens of the context before each bounding token, and its token."""
    ids, steps = np.divmod((codes - 1) // 2, _STEPS)
    return steps, ids
