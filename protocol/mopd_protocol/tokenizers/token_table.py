"""``TokenTable``: the exact bytes of every token id, and the names of those that spell none.

Tokens are never decoded one at a time to text: half a character would become U+FFFD and a
leading space would be lost. Surfaces are mapped to bytes, and bytes are compared with bytes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_serializer
from tokenizers import Tokenizer

from mopd_protocol.arrays import ArrayLike, frozen_array
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.joined_texts import SEPARATOR, JoinedTexts, TextTokens
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence, valid_utf8
from mopd_protocol.tokenizers.tokenizer_file import (
    JSON,
    byte_level_alphabet,
    continuation_tokenizer,
    fingerprint,
    has_byte_fallback,
    kind_of,
    merges_of,
    metaspace_of,
    spells_every_text,
    tokenizer_json,
)

_BYTE_SURFACE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: Characters, or bytes outside them, as Python decodes them.
_CHARACTERS_OR_BYTES = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")


class TokenRoles(BaseModel):
    """Ids of the control tokens that model families name differently.

    Serialized without ``other_ends`` if there are none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bos: int | None = None
    eos: int | None = None
    end_of_turn: int | None = None
    pad: int | None = None
    other_ends: tuple[int, ...] = ()
    """Further ids that end a completion, of the model's generation settings."""

    @property
    def ending(self) -> tuple[int, ...]:
        """Ids that end a completion: end of turn first, then end of text, then all others; may be
        empty."""
        ending = (role for role in (self.end_of_turn, self.eos) if role is not None)
        return tuple(dict.fromkeys((*ending, *self.other_ends)))

    @property
    def single(self) -> dict[str, int | None]:
        """Role -> id, of the roles that one token has."""
        return {"bos": self.bos, "eos": self.eos, "end_of_turn": self.end_of_turn, "pad": self.pad}

    @model_serializer
    def _serialized(self) -> dict[str, int | list[int] | None]:
        ends = {"other_ends": [*self.other_ends]} if self.other_ends else {}
        return {**self.single, **ends}


def control_tokens(description: JSON) -> dict[str, int]:
    """Literal text -> id of the special tokens of a tokenizer's JSON."""
    added = description.get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token["special"]}


@dataclass(frozen=True, eq=False)
class TokenTable:
    """id -> bytes for one tokenizer; control tokens have zero bytes and a mark.

    Special added tokens are control tokens. Added tokens that are not special (runs of spaces,
    ``<think>`` in many families) stay in decoded text by definition, so they spell their content
    like any other token, and are aligned by bytes.

    Raises:
        DataError: when a role names an id outside the vocabulary (``from_tokenizer``) or a
            requested id has no token.
    """

    fingerprint: str
    roles: TokenRoles
    offsets: NDArray[np.int64]  # [size + 1]; token i spells data[offsets[i]:offsets[i + 1]]
    data: NDArray[np.uint8]  # all tokens' bytes, one after the other
    present: NDArray[np.bool_]  # [size]; False for holes in the numbering
    marks: Mapping[int, str]  # control token id -> name
    controls: Mapping[str, int]  # literal text of a control token -> id
    exact_text: bool  # see ``spells_every_text``

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, roles: TokenRoles | None = None) -> "TokenTable":
        """Reads the table from a fast tokenizer."""
        return cls.from_json(tokenizer_json(tokenizer), roles or TokenRoles())

    @classmethod
    def from_json(cls, description: JSON, roles: TokenRoles) -> "TokenTable":
        """Reads the table from the JSON of a fast tokenizer."""
        surfaces = _model_surfaces(description)
        added = {token["id"]: token for token in description.get("added_tokens") or []}
        spell = _speller(description)
        # Byte-level vocabularies add plain text; SentencePiece ones add surfaces (Gemma's ``▁▁``).
        spell_added = str.encode if kind_of(description) == "byte_level" else spell
        size = max([*surfaces, *added], default=-1) + 1
        spelled = [b""] * size
        present = np.zeros(size, dtype=np.bool_)
        for token_id, surface in surfaces.items():
            present[token_id] = True
            if token_id not in added:
                spelled[token_id] = spell(surface)
        for token_id, token in added.items():
            present[token_id] = True
            spelled[token_id] = b"" if token["special"] else spell_added(token["content"])
        _check_roles(roles, size)
        controls = control_tokens(description)
        marks = {token_id: content for content, token_id in controls.items()}
        for name, token_id in (("bos", roles.bos), ("pad", roles.pad)):
            if token_id is not None and token_id in marks:
                marks[token_id] = name
        for token_id in roles.ending:
            marks[token_id] = END_OF_TURN
            spelled[token_id] = b""
        offsets = np.zeros(size + 1, dtype=np.int64)
        np.cumsum([len(piece) for piece in spelled], out=offsets[1:])
        return cls(
            fingerprint=fingerprint(description),
            roles=roles,
            offsets=frozen_array(offsets, "int64"),
            data=np.frombuffer(b"".join(spelled), dtype=np.uint8),
            present=frozen_array(present, "bool"),
            marks=MappingProxyType(marks),
            controls=MappingProxyType(controls),
            exact_text=spells_every_text(description),
        )

    @property
    def size(self) -> int:
        """Number of ids, holes counted: the highest id plus one."""
        return len(self.present)

    def real_ids(self, logit_width: int) -> NDArray[np.bool_]:
        """[logit_width], True where a row of the head belongs to a token; padding rows are False.

        Raises:
            DataError: when the head is narrower than the tokenizer.
        """
        if logit_width < self.size:
            raise DataError(
                f"a head of {logit_width} rows cannot serve a tokenizer of {self.size} ids; "
                "is this the tokenizer of this model?"
            )
        return np.pad(self.present, (0, logit_width - self.size))

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """[size], bytes that each token spells."""
        return frozen_array(np.diff(self.offsets), "int64")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for control tokens and holes."""
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    def name_of(self, token_id: int) -> str:
        """The literal text of a control token, or of another token as far as it is text."""
        names = (name for name, control_id in self.controls.items() if control_id == token_id)
        return next(names, self.bytes_of(token_id).decode(errors="replace") or f"id {token_id}")

    @cached_property
    def all_bytes(self) -> list[bytes]:
        """The bytes of every token, by id."""
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[start:end] for start, end in pairwise(ends)]

    def sequence(self, token_ids: ArrayLike) -> TokenSequence:
        """The ids with their byte ends, text and marks.

        Raises:
            DataError: when an id has no token in this tokenizer (a padded head can emit such ids).
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        self.require_known(ids)
        lengths = self.byte_lengths[ids]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        source = np.repeat(self.offsets[ids] - (ends - lengths), lengths) + np.arange(total)
        marks = {
            int(position): self.marks[int(ids[position])]
            for position in np.flatnonzero(lengths == 0)
            if int(ids[position]) in self.marks
        }
        return TokenSequence(
            token_ids=ids.astype(np.int32),
            byte_ends=ends.astype(np.int32),
            text=self.data[source].tobytes(),
            marks=marks,
        )

    def require_known(self, token_ids: NDArray[np.int64]) -> None:
        """Raises DataError when an id is outside the tokenizer or a hole in it."""
        inside = (token_ids >= 0) & (token_ids < self.size)
        known = inside & self.present[np.where(inside, token_ids, 0)] if self.size else inside
        if not known.all():
            raise DataError(
                f"token id {int(token_ids[~known][0])} has no token in tokenizer "
                f"{self.fingerprint[:12]} of {self.size} ids; were ids of another tokenizer sent?"
            )


class TextEncoder:
    """Completion text -> a ``TokenSequence``, as a continuation of any preceding text.

    Text is never encoded to a special token, no leading space is added, nothing is appended.
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenTable) -> None:
        self.table = table
        self._source = tokenizer
        self._tokenizer = continuation_tokenizer(tokenizer_json(tokenizer))
        self._joined = JoinedTexts(self._tokenizer)

    @cached_property
    def merges(self) -> NDArray[np.int64]:
        """[merges, 3], see ``merges_of``."""
        return merges_of(tokenizer_json(self._source))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return encode_text(self._tokenizer_of(text), text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        tokens = self.encode_arrays(texts)
        ids, ends = tokens.ids.tolist(), np.cumsum(tokens.counts).tolist()
        return [ids[start:end] for start, end in pairwise([0, *ends])]

    def encode_arrays(self, texts: Sequence[str]) -> TextTokens:
        """Return the token ids of all texts in succession."""
        if any(SEPARATOR in text for text in texts):
            encoded = [self.encode(text) for text in texts]
            ids = np.array([token for each in encoded for token in each], dtype=np.int64)
            return TextTokens(ids, np.array([len(each) for each in encoded], dtype=np.int64))
        return self._joined.encode(texts)

    def encode_bytes(self, text: bytes) -> list[int] | None:
        """Token ids of bytes that may not be valid UTF-8; None if no token spells one of them.

        Characters are encoded as text, and the bytes between them with the longest tokens: a
        student that samples tokens of single bytes may leave a character incomplete.
        """
        ids: list[int] = []
        for piece in _pieces(text):
            encoded = self.encode(piece) if isinstance(piece, str) else self._fragments_of(piece)
            if encoded is None:
                return None
            ids += encoded
        return ids

    def _fragments_of(self, text: bytes) -> list[int] | None:
        """Return the longest tokens, from left to right, that spell bytes outside characters."""
        ids: list[int] = []
        while text:
            lengths = range(len(text), 0, -1)
            length = next((each for each in lengths if text[:each] in self._fragments), 0)
            if not length:
                return None
            ids.append(self._fragments[text[:length]])
            text = text[length:]
        return ids

    @cached_property
    def _fragments(self) -> dict[bytes, int]:
        """Bytes that are no text -> the token that spells them."""
        spelled = enumerate(self.table.all_bytes)
        return {each: token_id for token_id, each in spelled if valid_utf8(each) != each}

    def encode_with_spans(self, text: bytes) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Token ids as of ``encode_bytes``, and the bytes of ``text`` that each token is from.

        Tokens that are parts of one character are all from its bytes. No token is from a
        character that the normalizer removed.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        begin = 0
        for piece in _pieces(text):
            if isinstance(piece, str):
                encoding = self._tokenizer_of(piece).encode(piece, add_special_tokens=False)
                ends = np.cumsum([begin, *(len(each.encode()) for each in piece)]).tolist()
                ids += encoding.ids
                spans += [(ends[start], ends[stop]) for start, stop in encoding.offsets]
                begin = ends[-1]
                continue
            fragments = self._fragments_of(piece)
            if fragments is None:
                return None
            ids += fragments
            for fragment in fragments:
                end = begin + len(self.table.all_bytes[fragment])
                spans.append((begin, end))
                begin = end
        return ids, spans

    def _tokenizer_of(self, text: str) -> Tokenizer:
        """Return a tokenizer for which every character of a text is text."""
        return self._without_separator if SEPARATOR in text else self._tokenizer

    @cached_property
    def _without_separator(self) -> Tokenizer:
        return continuation_tokenizer(tokenizer_json(self._source))


def _pieces(text: bytes) -> Iterator[str | bytes]:
    """Divide bytes into characters and the bytes between them."""
    for piece in _CHARACTERS_OR_BYTES.findall(text.decode(errors="surrogateescape")):
        is_text = not "\udc80" <= piece[0] <= "\udcff"
        yield piece if is_text else piece.encode(errors="surrogateescape")


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of ``text``, without special tokens and without the GIL.

    ``Tokenizer.encode`` keeps the GIL, for seconds if a text has megabytes, and computes offsets,
    which are not used; ``encode_batch_fast`` does neither.
    """
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, begun as the tokenizer begins a text, but not ended.

    Some tokenizers also put an end of text behind every text; a completion after that would be the
    beginning of another text.
    """
    [encoding] = tokenizer.encode_batch_fast([text])
    own = [position for position, added in enumerate(encoding.special_tokens_mask) if not added]
    return encoding.ids[: own[-1] + 1] if own else encoding.ids


def _model_surfaces(description: JSON) -> dict[int, str]:
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [surface, score] in id order
        return {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
    return {token_id: surface for surface, token_id in vocabulary.items()}


def _speller(description: JSON) -> Callable[[str], bytes]:
    if kind_of(description) == "byte_level":
        return _spell_byte_level
    metaspace, fallback = metaspace_of(description), has_byte_fallback(description)

    def spell(surface: str) -> bytes:
        byte = _BYTE_SURFACE.fullmatch(surface) if fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return surface.replace(metaspace, " ").encode()

    return spell


_ALPHABET = byte_level_alphabet()


def _spell_byte_level(surface: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in surface])
    except KeyError:  # a surface outside the alphabet is literal text (in some vocabularies)
        return surface.encode()


def _check_roles(roles: TokenRoles, size: int) -> None:
    others = (("other_ends", token_id) for token_id in roles.other_ends)
    for name, token_id in (*roles.single.items(), *others):
        if token_id is not None and not 0 <= token_id < size:
            raise DataError(
                f"role {name} names token id {token_id}, but the tokenizer has ids 0 to {size - 1}"
            )
