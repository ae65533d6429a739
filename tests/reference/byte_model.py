"""The exact next-byte distribution of a token model, by extra rows.

A canonical tokenizer writes a text that has a token's end at byte ``s`` with ``encode(text[:s])``
up to that byte. So a text ``y`` can continue behind few contexts, at most one for each byte:

    F(y) = sum over s < len(y) of  p(encode(y[:s])) * mass of its next tokens that begin with y[s:]

is the probability that a text begins with ``y``, and the next byte behind ``x`` has the probability
``F(x + b) / sum over b of F(x + b)``. The sum over the bytes of a text, of the divergence between
the next-byte distributions of two models, is in expectation their divergence as distributions over
texts: 0 for models that agree, through any tokenizers. The form is that of Hayase et al.
(arXiv 2506.14123, byte-level sampling) and Phan et al. (arXiv 2410.09303).

Exact for longest match, Unigram and BPE, up to what a pre-tokenizer sees of the text behind a
token. Mass of tokens that the tokenizer would not write is text, too, but nothing follows it.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

#: The symbol behind the 256 bytes: the end of the text.
END = 256
SYMBOLS = 257

#: Continuations of text that ends with white space: a tokenizer may have a token of a space and one
#: of them, but hardly of all.
_BEHIND_SPACE = tuple(bytes([byte]) for byte in range(0x21, 0x7F))

#: Context ids -> log-probabilities over the vocabulary, nats.
Row = Callable[[tuple[int, ...]], NDArray[np.float64]]

#: Bytes, and all of the text that they are from -> the tokens of these bytes in texts that have a
#: token's end behind them: one sequence of ids, none if no text has one, or several, if the
#: tokenizer divides the end of the bytes by what follows, as white space.
Encode = Callable[[bytes, bytes], Sequence[Sequence[int]]]


@dataclass(frozen=True, eq=False)
class NextBytes:
    """Distributions behind each beginning of a text, the whole text included."""

    logprobs: NDArray[np.float64]  # [bytes + 1, SYMBOLS], nats
    logmasses: NDArray[np.float64]
    """[bytes + 1], nats: the mass of the text so far and anything that follows, without omitted
    contexts and mass that nothing follows."""
    omitted: NDArray[np.float64]
    """[bytes + 1], at most this share of the mass of the text so far is behind contexts that were
    omitted."""
    rows: int  # contexts of which the model gave its row

    def of_text(self, text: bytes) -> NDArray[np.float64]:
        """Return nats [bytes + 1] of the bytes of the text and of its end."""
        return self.logprobs[np.arange(len(text) + 1), [*text, END]]


@dataclass(eq=False)
class _Context:
    """Tokens, of which the model may not have given its row yet."""

    ids: tuple[int, ...]
    before: "_Context | None"  # without the last token
    logmass: float | None = None
    row: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False)
class ByteModel:
    """A token model as a distribution over texts."""

    token_bytes: Sequence[bytes]
    """The bytes of each id; empty for ids that are no text."""
    ends: Sequence[int]
    """The ids with which a text ends."""
    encode: Encode
    row: Row
    least_share: float = 1e-3
    """Contexts with a smaller share of the mass of the text so far are omitted, unless the text
    continues behind no other one."""

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        tokens = ((spelled, token) for token, spelled in enumerate(self.token_bytes))
        return sorted((spelled, token) for spelled, token in tokens if spelled)

    @cached_property
    def _behind(self) -> dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return {}

    def next_bytes(self, text: bytes) -> NextBytes:
        """Return the distribution of what follows each beginning of a text.

        Raises:
            ValueError: if the model does not have the text, or its tokens spell another one.
        """
        reading = _Reading(self, text)
        logprobs = np.full((len(text) + 1, SYMBOLS), -np.inf)
        logmasses, omitted = np.zeros((2, len(text) + 1))
        for length in range(len(text) + 1):
            logprobs[length], logmasses[length], omitted[length] = reading.following(length)
        return NextBytes(logprobs, logmasses, omitted, reading.rows)

    def continuations(self, begun: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the longer tokens that begin with some bytes, and the next byte of each."""
        if begun not in self._behind:
            first = bisect_left(self._sorted, (begun, -1))
            ids: list[int] = []
            following: list[int] = []
            for spelled, token in self._sorted[first:]:
                if not spelled.startswith(begun):
                    break
                if len(spelled) > len(begun):
                    ids.append(token)
                    following.append(spelled[len(begun)])
            self._behind[begun] = np.array(ids, dtype=np.int64), np.array(following, dtype=np.int64)
        return self._behind[begun]


class _Reading:
    """A text from its first byte on."""

    def __init__(self, model: ByteModel, text: bytes) -> None:
        self._model = model
        self._text = text
        self._contexts: dict[tuple[int, ...], _Context] = {(): _Context((), None, 0.0)}
        self._open: list[tuple[int, _Context]] = []  # with the byte behind which they end
        self._logtext = 0.0  # nats of F, without omitted contexts
        self.rows = 0

    def following(self, length: int) -> tuple[NDArray[np.float64], float, float]:
        """Return the log-probabilities of what follows the first bytes, nats of its mass, and the
        most that was omitted. Lengths are in order."""
        model, text = self._model, self._text[:length]
        for ids in model.encode(text, self._text):
            if b"".join(model.token_bytes[token] for token in ids) != text:
                raise ValueError(f"the tokens of {text!r} spell another text")
            self._open.append((length, self._context(tuple(ids))))
        masses, omitted = self._masses(text, model.least_share)
        symbol = self._text[length] if length < len(self._text) else int(masses.argmax())
        if not masses[symbol]:
            masses, omitted = self._masses(text, 0.0)
        if not masses[symbol]:
            raise ValueError(f"the model does not continue {text!r} with {symbol}")
        logmass = self._logtext + math.log(masses.sum())
        self._logtext += math.log(masses[symbol])
        with np.errstate(divide="ignore"):
            return np.log(masses / masses.sum()), logmass, omitted

    def _masses(self, text: bytes, least_share: float) -> tuple[NDArray[np.float64], float]:
        """[SYMBOLS], the mass of what follows, relative to that of the text so far; the omitted
        mass."""
        masses, omitted = np.zeros(SYMBOLS), 0.0
        for start, context in list(self._open):
            begun = text[start:]
            ids, following = self._model.continuations(begun)
            if begun and not len(ids):
                self._open.remove((start, context))
                continue
            share = self._share(self._most(context))
            if context.row is None and share > 0 and share >= least_share:
                share = self._share(self._mass(context))
                if share > 0 and share >= least_share:
                    self._read(context)
            if context.row is None:
                omitted = min(omitted + share, 1.0)
                continue
            np.add.at(masses, following, share * np.exp(context.row[ids]))
            if not begun:
                masses[END] += share * np.exp(context.row[list(self._model.ends)]).sum()
        return masses, omitted

    def _share(self, logmass: float) -> float:
        """Return a mass relative to that of the text so far, of which it may be a part only."""
        return math.exp(logmass - self._logtext)

    def _context(self, ids: tuple[int, ...]) -> _Context:
        if ids not in self._contexts:
            self._contexts[ids] = _Context(ids, self._context(ids[:-1]))
        return self._contexts[ids]

    def _most(self, context: _Context) -> float:
        """Return nats: the highest mass of a context, by the rows that were read."""
        while context.logmass is None and context.before is not None:
            if context.before.row is not None:
                return self._mass(context)
            context = context.before
        return self._mass(context)

    def _mass(self, context: _Context) -> float:
        """Return nats: the mass of a context; the rows before it are read for that."""
        if context.logmass is None:
            assert context.before is not None  # the empty one has a mass
            context.logmass = self._mass(context.before)
            if context.logmass > -math.inf:
                context.logmass += float(self._read(context.before)[context.ids[-1]])
        return context.logmass

    def _read(self, context: _Context) -> NDArray[np.float64]:
        if context.row is None:
            context.row = self._model.row(context.ids)
            self.rows += 1
        return context.row


def divergence(first: NextBytes, second: NextBytes) -> NDArray[np.float64]:
    """Return KL(first || second), nats [bytes + 1], of what follows each beginning of a text."""
    own, other = first.logprobs, second.logprobs
    has_mass = own > -np.inf
    with np.errstate(invalid="ignore"):
        terms = np.where(has_mass, np.exp(own) * (own - other), 0.0)
    return terms.sum(axis=1)


def encoding_of_text(
    encode: Callable[[str], Sequence[int]], token_bytes: Sequence[bytes]
) -> Encode:
    """Return an ``Encode`` for a tokenizer of whole characters.

    A token may end inside a character. The tokens before are those of any text with a token's end
    at that byte: of the text itself, else of one that completes the character otherwise. A
    pre-tokenizer may divide white space by what follows, a word or the end.
    """

    def begins(data: bytes, length: int) -> tuple[int, ...] | None:
        ids = encode(data.decode())
        ends = [0, *accumulate(len(token_bytes[token]) for token in ids)]
        return tuple(ids[: ends.index(length)]) if length in ends else None

    def of_bytes(data: bytes, text: bytes) -> Sequence[Sequence[int]]:
        try:
            data.decode()
        except UnicodeDecodeError:
            completed = (begins(each, len(data)) for each in completions(data, text))
            return [ids for ids in completed if ids is not None][:1]
        behind = [b"", *_BEHIND_SPACE] if data[-1:].isspace() else [b""]
        divided = (begins(data + each, len(data)) for each in behind)
        return list(dict.fromkeys(ids for ids in divided if ids is not None))

    return of_bytes


def completions(data: bytes, text: bytes) -> Iterator[bytes]:
    """Yield texts that complete the last character of some bytes, first as the text does."""
    start = max(at for at, byte in enumerate(data) if byte & 0xC0 != 0x80)
    lead, begun = data[start], data[start:]
    missing = (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) - len(begun)
    own = text[: len(data) + missing]
    tails = [bytes([byte]) for byte in range(0x80, 0xC0)]
    if missing > 1:
        fill = b"\x80" * (missing - 2)
        tails = [tail + fill + bytes([last]) for tail in tails for last in (0x80, 0x95, 0xBF)]
    for whole in dict.fromkeys([own, *(data + tail for tail in tails)]):
        try:
            whole.decode()
        except UnicodeDecodeError:
            continue
        yield whole
