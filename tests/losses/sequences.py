"""Token sequences from what their tokens spell, and texts cut in two ways at random."""

from hypothesis import strategies as st

from mopd_losses.alignment.byte_alignment import Alignment, align
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from tests.reference.alignment import Span

#: Bytes that a token spells, or the name of a control token.
Piece = bytes | str

MARKS = (END_OF_TURN, "bos", "<tool>")


def sequence(pieces: list[Piece], first_id: int = 0) -> TokenSequence:
    """Token by token; ids count from ``first_id``."""
    ends: list[int] = []
    text = b""
    for piece in pieces:
        text += piece if isinstance(piece, bytes) else b""
        ends.append(len(text))
    return TokenSequence(
        token_ids=list(range(first_id, first_id + len(pieces))),
        byte_ends=ends,
        text=text,
        marks={at: piece for at, piece in enumerate(pieces) if isinstance(piece, str)},
    )


def spans(alignment: Alignment) -> list[Span]:
    """The four columns as rows."""
    columns = (
        alignment.student_starts,
        alignment.student_ends,
        alignment.teacher_starts,
        alignment.teacher_ends,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def aligned(student: list[Piece], teacher: list[Piece]) -> list[Span]:
    """The fast alignment of two lists of pieces whose ids have nothing in common."""
    return spans(align(sequence(student), sequence(teacher, first_id=1000)))


@st.composite
def texts(draw: st.DrawFn, alphabet: bytes = b"ab\xe7\x9a\x84 ") -> list[Piece]:
    """Single bytes and control tokens; few letters, so that parts repeat."""
    letters = st.sampled_from([bytes([byte]) for byte in alphabet])
    symbol = st.one_of(letters, letters, letters, st.sampled_from(MARKS))
    return draw(st.lists(symbol, max_size=16))


@st.composite
def cut(draw: st.DrawFn, text: list[Piece]) -> list[Piece]:
    """The text with its bytes grouped at random into tokens."""
    pieces: list[Piece] = []
    for symbol in text:
        joins = (
            isinstance(symbol, bytes)
            and bool(pieces)
            and isinstance(pieces[-1], bytes)
            and draw(st.booleans())
        )
        if joins:
            pieces[-1] += symbol
        else:
            pieces.append(symbol)
    return pieces


@st.composite
def two_tokenizations(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """One text, cut in two ways."""
    text = draw(texts())
    return draw(cut(text)), draw(cut(text))


@st.composite
def two_texts(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """Two texts that share a beginning, an end and parts between, each cut its own way."""
    shared = [draw(texts()) for _ in range(draw(st.integers(1, 3)))]
    sides: list[list[Piece]] = [[], []]
    for part in shared:
        for side in sides:
            side.extend(part)
            side.extend(draw(texts()) if draw(st.booleans()) else [])
    return draw(cut(sides[0])), draw(cut(sides[1]))
