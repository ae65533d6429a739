"""``JoinedTexts``: many short texts are tokenized as a few joined ones.

A call of the tokenizers library takes several microseconds per text, more than the tokens of a word
take. Texts that are joined by a separator, an added token that the library finds before it
normalizes or divides anything, have the same tokens, in half of the time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

#: A code point that is no character.
SEPARATOR = "\U0010ffff"

#: Texts that are joined; with more, the library is slower.
_JOINED = 32

#: Mean length of texts that are joined, in characters.
_SHORT = 128


class TextTokens(NamedTuple):
    """The tokens of several texts, one text after another."""

    ids: NDArray[np.int64]  # [tokens]
    counts: NDArray[np.int64]  # [texts], tokens


class JoinedTexts:
    """Tokenizes lists of texts.

    Args:
        tokenizer: adds nothing to a text; the separator is added to its tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens([AddedToken(SEPARATOR, normalized=False)])
        self._tokenizer = tokenizer
        self._separator: int | None = tokenizer.token_to_id(SEPARATOR)

    def encode(self, texts: Sequence[str]) -> TextTokens:
        """Return the token ids of each text; none may contain ``SEPARATOR``."""
        joined = 1 if sum(map(len, texts)) > _SHORT * len(texts) else _JOINED
        starts = range(0, len(texts), joined)
        chunks = [SEPARATOR.join(texts[start : start + joined]) for start in starts]
        assert self._separator is not None
        ids: list[int] = []
        for encoding in self._encodings(chunks):
            ids += encoding.ids
            ids.append(self._separator)
        tokens = np.array(ids, dtype=np.int64)
        is_token = tokens != self._separator
        return TextTokens(tokens[is_token], np.diff(np.flatnonzero(~is_token), prepend=-1) - 1)

    def _encodings(self, texts: list[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
