"""Tokens that make a completion's bytes invalid are trained down by every cross-tokenizer loss."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.build import build_loss
from mopd_losses.config import AlmConfig, CtkdConfig, GoldConfig, PrefixKlConfig, SimctConfig
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.core.valid_text import ValidTextLoss, invalid_positions
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN
from tests.losses.prefix_pairs import END, Pair, Tongue, compared
from tests.losses.sequences import Piece, sequence

PAIR = Pair(Tongue.of("ab"), Tongue.of("ba", end="<stop>"))

#: Parts of characters of one to four bytes, and bytes that no text contains.
PIECES = [
    b"a",
    b"\xc3",
    b"\xa9",
    b"\xe2",
    b"\x82\xac",
    b"\xf0\x9f",
    b"\x98",
    b"\xff",
    b"\xc3\xa9\xe2",
    b"",
]


def is_beginning(data: bytes) -> bool:
    """Decode with every possible end of a character."""
    ends = (
        bytes(end) for length in range(4) for end in product(b"\x80\x90\xa0\xbf", repeat=length)
    )
    for end in ends:
        try:
            (data + bytes(end)).decode()
        except UnicodeDecodeError:
            continue
        return True
    return False


def slow_invalid_positions(pieces: list[Piece]) -> list[int]:
    """Extend the text token by token; after an invalid one, begin with its last character."""
    positions: list[int] = []
    begun = b""
    for position, piece in enumerate(pieces):
        if isinstance(piece, str):
            is_valid = not begun or begun.decode(errors="replace")[-1:] != "\ufffd"
            begun = b""
        elif is_valid := is_beginning(begun + piece):
            begun += piece
        else:
            suffixes = (piece[at:] for at in range(len(piece)))
            begun = next((s for s in suffixes if 0xC2 <= s[0] <= 0xF4 and is_beginning(s)), b"")
        if not is_valid:
            positions.append(position)
    return positions


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=6), ended=st.booleans())
def test_invalid_tokens_are_those_that_no_text_contains(pieces: list[bytes], ended: bool) -> None:
    tokens: list[Piece] = [*pieces, *([END_OF_TURN] if ended else [])]
    assert invalid_positions(sequence(tokens)) == slow_invalid_positions(tokens)


@pytest.mark.parametrize(
    "config", [PrefixKlConfig(), CtkdConfig(), AlmConfig(), GoldConfig(), SimctConfig()]
)
def test_a_cross_tokenizer_loss_trains_an_invalid_token_down(config: object) -> None:
    student, teacher = PAIR.student, PAIR.teacher
    half = student.table.all_bytes.index(b"\xe2")
    ids = [*student.ids(["a"]), half, *student.ids(["b", END])]
    teacher_ids = teacher.encoder.encode("a\ufffdb") + teacher.ids([END])
    rows = torch.zeros(len(teacher_ids), teacher.family.logit_width).double().log_softmax(dim=1)
    comparison = compared(PAIR, ids, teacher_ids, rows, k=8)
    loss = build_loss(config, student, teacher)  # type: ignore[arg-type]
    assert isinstance(loss, ValidTextLoss)
    logits = torch.zeros(len(ids), student.logit_width, dtype=torch.float64)
    logits[2, student.ids(["b"])] = 2.0
    logits.requires_grad_()
    targets = loss.targets([comparison], [0])
    assert targets.invalid.positions.tolist() == [2]  # "b" where a character was begun
    outputs = [
        part(DenseRows(logits, PAIR.real_ids), chosen)
        for part, chosen in ((loss, targets), (loss.inner, targets.inner))
    ]
    difference = outputs[0].per_token - outputs[1].per_token
    chosen = torch.tensor(student.ids(["b"]))
    probability = DenseRows(logits, PAIR.real_ids).logprobs(torch.tensor([2]), chosen).exp()
    torch.testing.assert_close(difference[2:3], -torch.log(1 - probability))
    assert difference[[0, 1, 3]].abs().max() == 0
    (gradient,) = torch.autograd.grad(difference.sum(), logits)
    assert gradient[2, student.ids(["b"])].item() > 0.01
    assert torch.equal(outputs[0].compared, outputs[1].compared)
    part = loss(DenseRows(logits[2:3], PAIR.real_ids), targets.between(2, 3))
    assert part.per_token[0] >= difference[2]
