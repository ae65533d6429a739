"""Sides of a pair as the oracle of next bytes sees them."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tests.losses.prefix_pairs import LongestMatch, Tongue, rows_of
from tests.reference.byte_model import ByteModel, Encode, Row, encoding_of_text
from tests.reference.text_model import TokenModel


def byte_model(side: Tongue, row: Row, least_share: float = 1e-3) -> ByteModel:
    """A model of a side's tokens."""
    token_bytes = [b"" if token in side.table.marks else b for token, b in _spelled(side)]
    encode = _encode(side, token_bytes)
    return ByteModel(token_bytes, [side.end], encode, row, least_share)


def exact_side(side: Tongue, texts: Mapping[str, float], least_share: float = 1e-3) -> ByteModel:
    """The model of a few texts through a side's tokenizer."""
    of_ids = rows_of(side, TokenModel(dict(texts), side.tokenize))

    def row(ids: tuple[int, ...]) -> NDArray[np.float64]:
        return of_ids([*ids]).numpy()

    return byte_model(side, row, least_share)


def _spelled(side: Tongue) -> list[tuple[int, bytes]]:
    return [(token, spelled or b"") for token, spelled in enumerate(side.table.all_bytes)]


def _encode(side: Tongue, token_bytes: list[bytes]) -> Encode:
    if isinstance(side.encoder, LongestMatch):
        return lambda data, _: [side.encode_bytes(data)]
    return encoding_of_text(side.encoder.encode, token_bytes)
