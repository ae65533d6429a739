"""``TokenSequence``: one tokenization of one completion, and the bytes that its tokens spell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from mopd_protocol.arrays import IntArray, frozen_array
from mopd_protocol.errors import DataError

#: The mark of every token that ends a completion (end of turn, end of text), under any name.
END_OF_TURN = "end_of_turn"


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Token ids of a completion, where each ends in the completion's bytes, and its control tokens.

    Byte ends are what makes two tokenizations of one text comparable. A control token spells no
    bytes; ``marks`` gives its name by position, so that the other side's can be found by name.

    Raises:
        DataError: when lengths disagree, ends decrease, or a token with bytes has a mark.
    """

    token_ids: IntArray  # [tokens]
    byte_ends: IntArray  # [tokens], exclusive, in bytes of ``text``
    text: bytes  # what the tokens spell; not always valid UTF-8
    marks: Mapping[int, str] = field(default_factory=dict[int, str])  # token position -> name

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", frozen_array(self.token_ids, "int32"))
        object.__setattr__(self, "byte_ends", frozen_array(self.byte_ends, "int32"))
        object.__setattr__(self, "marks", MappingProxyType(dict(sorted(self.marks.items()))))
        ids, ends = self.token_ids, self.byte_ends
        if ids.ndim != 1 or ids.shape != ends.shape:
            raise DataError(
                f"token ids of shape {ids.shape} and byte ends of shape {ends.shape}: "
                "expected two vectors of one length"
            )
        if len(ends) and (int(ends[0]) < 0 or bool((ends[1:] < ends[:-1]).any())):
            raise DataError("byte ends decrease along the sequence; expected a running total")
        spelled = int(ends[-1]) if len(ends) else 0
        if spelled != len(self.text):
            raise DataError(
                f"the tokens end at byte {spelled} but the text has {len(self.text)} bytes"
            )
        for position, name in self.marks.items():
            if not 0 <= position < len(ids):
                raise DataError(f"mark {name!r} is at token {position} of {len(ids)}")
            start = int(ends[position - 1]) if position else 0
            if int(ends[position]) != start:
                raise DataError(
                    f"mark {name!r} is on token {position}, which spells "
                    f"{int(ends[position]) - start} bytes; a control token spells none"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def byte_starts(self) -> IntArray:
        """[tokens], the bytes before each."""
        return frozen_array(np.append(0, self.byte_ends)[: len(self)], "int32")

    @property
    def ends_turn(self) -> bool:
        """True if the last token is a control token that ends the completion."""
        return len(self) > 0 and self.marks.get(len(self) - 1) == END_OF_TURN


def valid_utf8(text: bytes) -> bytes:
    """Return the longest prefix that is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text
