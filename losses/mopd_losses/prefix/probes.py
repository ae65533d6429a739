"""``Probes``: texts that may follow a token that is shorter than the sampled one.

A tokenizer may write the shorter token in front of them, and then a token that spans the boundary
or ends at it: mass of the rest that is known by a bound only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.text.contexts import Contexts
from mopd_losses.prefix.text.strings import Strings
from mopd_losses.prefix.vocabulary.hashed_strings import Integers, indices_in_runs, ranks_in_runs

#: Tokens that are tried after a shorter token.
_PROBES = 4

#: The longest end of a text after a shorter token, in characters, and how many tokens that begin
#: with it are tried: a token may cross a boundary, although none begins where the shorter one ends.
LONGEST_END, PROBES_AFTER_ENDS = 2, 8


@dataclass(frozen=True, eq=False)
class Probes:
    """Strings that may follow a boundary after a token that is shorter than a sampled one."""

    texts: Strings  # [n]
    boundaries: Integers  # [n]
    rows: Integers  # [n], of the shorter token: what is before does not matter to what follows


def probed(
    contexts: Contexts, rows: Integers, tokens: Integers, likely: NDArray[np.bool_]
) -> Probes:
    """Return a few strings that may follow, by tokens that follow a shorter one.

    Args:
        rows: ascending.
        tokens: of these rows, shorter than the sampled ones, which begin with them.
        likely: [tokens], whether tokens are tried that begin after the shorter one, too.
    """
    text, vocabulary = contexts.text, contexts.text.vocabulary
    first, last = np.searchsorted(rows, [contexts.first_rows, contexts.covering_rows + 1])
    boundaries, at = indices_in_runs(first, np.maximum(first, last))
    ends = text.starts[rows[at]] + vocabulary.lengths[tokens[at]]
    offsets = contexts.places.offsets[boundaries]
    kept = ends < offsets
    boundaries, ends, offsets, at = boundaries[kept], ends[kept], offsets[kept], at[kept]
    columns = [(boundaries, ends, offsets, rows[at])]
    for length in range(1, LONGEST_END + 1):
        shorter = np.flatnonzero(likely[at] & (ends < offsets - length))
        shorter = shorter[np.flatnonzero(np.diff(boundaries[shorter], prepend=-1))]
        ended = offsets[shorter]
        columns.append((boundaries[shorter], ended - length, ended, rows[at[shorter]]))
    boundaries, ends, offsets, rows = map(np.concatenate, zip(*columns, strict=True))
    nodes = vocabulary.nodes_of(text.slices(ends, offsets))
    longer, stops = vocabulary.node_longer[nodes], vocabulary.node_stops[nodes]
    most = np.where(np.arange(len(nodes)) < int(kept.sum()), _PROBES, PROBES_AFTER_ENDS)
    steps = np.maximum(-(-(stops - longer) // most), 1)
    counts = -(-(stops - longer) // steps)
    index = np.repeat(np.arange(len(counts)), counts)
    ranks = longer[index] + ranks_in_runs(counts) * steps[index]
    ids, starts = vocabulary.ids[ranks], (offsets - ends)[index]
    # Nothing is a probe, too: tokens after the shorter one may end at the boundary.
    nothing = np.flatnonzero(likely[at])
    repeated = (np.diff(boundaries[nothing]) == 0) & (np.diff(rows[nothing]) == 0)
    nothing = np.delete(nothing, np.flatnonzero(repeated) + 1)
    ids = np.concatenate([ids, tokens[at[nothing]]])
    starts = np.concatenate([starts, vocabulary.lengths[tokens[at[nothing]]]])
    strings = Strings.of_tokens(vocabulary, text, ids, starts)
    index = np.concatenate([index, nothing])
    return Probes(strings, boundaries[index], rows[index])
