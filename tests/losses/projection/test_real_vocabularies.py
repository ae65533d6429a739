"""Alignment and projection of published vocabularies of 32,000 to 131,072 ids."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.config import ProjectionSettings
from mopd_losses.projection.matrix import ProjectionMatrix, build_projection
from tests.real_vocabularies import (
    MIXED_TEXT,
    NAMES,
    SENTENCEPIECE,
    STANDARD_LIBRARY,
    TEKKEN,
    python_sources,
    real,
)

pytestmark = pytest.mark.slow

PAIRS = [(student, teacher) for student, teacher in product(NAMES, NAMES) if student != teacher]
DECAY = ProjectionSettings(weights="decay")
LISTING = "".join(
    path.read_text(encoding="utf-8", errors="replace")[:20_000]
    for path in python_sources(STANDARD_LIBRARY)[::100]
)
TEXTS = {"mixed": MIXED_TEXT, "code": LISTING, "digits": "7" * 100_000}


@cache
def projection(
    student: str, teacher: str, settings: ProjectionSettings | None = None
) -> ProjectionMatrix:
    return build_projection(
        real(student).table,
        real(teacher).table,
        real(teacher).encoder,
        student_width=real(student).logit_width,
        settings=settings,
    )


def columns_of(matrix: ProjectionMatrix) -> NDArray[np.int64]:
    """[entries], the teacher id of each."""
    return np.repeat(np.arange(matrix.teacher_size), np.diff(matrix.column_starts))


def without_controls(text: str) -> str:
    """Remove lines with control tokens, which their libraries always parse."""
    return "\n".join(line for line in text.split("\n") if "[INST]" not in line)


def test_tekken_is_what_its_publishers_library_makes_of_it() -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    published = Tekkenizer.from_file(str(TEKKEN))
    assert real("tekken").table.size == published.n_words
    for text in (*TEXTS.values(), " ", "\n\n", "a"):
        assert real("tekken").encoder.encode(text) == published.encode(text, bos=False, eos=False)
    for token_id in range(1000, published.n_words):
        assert real("tekken").table.bytes_of(token_id) == published.id_to_byte_piece(token_id)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_a_sentencepiece_model_is_what_its_library_makes_of_it(name: str) -> None:
    from sentencepiece import SentencePieceProcessor

    published = SentencePieceProcessor(model_file=str(SENTENCEPIECE[name]))
    assert real(name).table.size == published.vocab_size()
    for text in (MIXED_TEXT, LISTING, "a b"):
        kept = without_controls(text)
        # Both put a space before the text; the encoder of completions must not.
        assert real(name).tokenizer.encode(kept, add_special_tokens=False).ids == published.encode(
            kept
        )
        assert real(name).encoder.encode(" " + kept) == published.encode(kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_spell_the_bytes_of_a_text(name: str, text: str) -> None:
    side = real(name)
    sequence = side.table.sequence(side.encoder.encode(TEXTS[text]))
    assert (sequence.text == TEXTS[text].encode()) is True
    assert not sequence.marks


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_aligns_in_the_finest_spans(student: str, teacher: str, text: str) -> None:
    left, right = (
        real(name).table.sequence(real(name).encoder.encode(TEXTS[text]))
        for name in (student, teacher)
    )
    alignment = align(left, right)
    assert alignment.aligned_bytes(left) == len(TEXTS[text].encode())
    common = sorted({*left.byte_ends.tolist()} & {*right.byte_ends.tolist()})
    assert (left.byte_ends[alignment.student_ends - 1].tolist() == common) is True
    assert (right.byte_ends[alignment.teacher_ends - 1].tolist() == common) is True
    assert alignment.student_starts.tolist() == [0, *alignment.student_ends[:-1].tolist()]
    assert alignment.teacher_starts.tolist() == [0, *alignment.teacher_ends[:-1].tolist()]


@pytest.mark.parametrize("settings", [None, DECAY], ids=["first", "decay"])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_every_token_with_bytes_is_projected_whole(
    student: str, teacher: str, settings: ProjectionSettings | None
) -> None:
    matrix, table = projection(student, teacher, settings), real(student).table
    sums = matrix.row_sums
    np.testing.assert_allclose(sums[: table.size][table.byte_lengths > 0], 1, atol=1e-6)
    assert not sums[table.size :].any()
    assert {*matrix.unprojected_ids.tolist()} <= {*table.marks}
    controls = np.array([*real(teacher).table.marks])
    from_text = ~np.isin(matrix.student_ids, [*table.marks])
    assert not np.isin(columns_of(matrix)[from_text], controls).any()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_a_row_goes_to_the_same_bytes_or_to_how_they_begin(student: str, teacher: str) -> None:
    matrix = projection(student, teacher)
    student_bytes, teacher_bytes = real(student).table.all_bytes, real(teacher).table.all_bytes
    known = {*teacher_bytes}
    columns = columns_of(matrix).tolist()
    exact = 0
    for student_id, teacher_id in zip(matrix.student_ids.tolist(), columns, strict=True):
        if student_bytes[student_id] in known:
            assert teacher_bytes[teacher_id] == student_bytes[student_id]
            exact += bool(student_bytes[student_id])
        else:
            assert teacher_bytes[teacher_id]
            assert student_bytes[student_id].startswith(teacher_bytes[teacher_id])
    assert exact == sum(spelled in known for spelled in student_bytes if spelled)
    assert (matrix.weights == 1).all()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_decaying_rows_follow_the_pieces_of_the_bytes(student: str, teacher: str) -> None:
    matrix = projection(student, teacher, DECAY)
    student_bytes, teacher_bytes = real(student).table.all_bytes, real(teacher).table.all_bytes
    order = np.lexsort((-matrix.weights, matrix.student_ids))
    students = matrix.student_ids[order]
    heaviest = np.flatnonzero(np.r_[True, students[1:] != students[:-1]])
    first = columns_of(matrix)[order][heaviest].tolist()
    rows = dict(zip(students[heaviest].tolist(), first, strict=True))
    assert all(
        student_bytes[row].startswith(teacher_bytes[target])
        for row, target in rows.items()
        if student_bytes[row]
    )
    counts = np.bincount(matrix.student_ids)
    assert counts.max() == DECAY.max_length
    known = {*teacher_bytes}
    assert all(
        counts[token_id] == 1
        for token_id, spelled in enumerate(student_bytes)
        if spelled and spelled in known
    )


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_an_end_maps_to_an_end(student: str, teacher: str) -> None:
    matrix = projection(student, teacher)
    ends = [*real(student).table.roles.ending]
    columns = columns_of(matrix)[np.isin(matrix.student_ids, ends)]
    assert len(columns) == len(ends)
    assert {*columns.tolist()} <= {*real(teacher).table.roles.ending}


def test_a_newer_release_of_a_vocabulary_is_reached_but_for_bytes_that_have_a_piece() -> None:
    matrix, older, newer = projection("v1", "v3"), real("v1").table, real("v3").table
    assert not len(matrix.unprojected_ids)
    shared = {*older.all_bytes}
    missed = {
        newer.bytes_of(token_id)
        for token_id in matrix.unsupported_ids.tolist()
        if newer.bytes_of(token_id) in shared and token_id not in newer.marks
    }
    # ``<0x41>`` and ``A`` spell the same; encoding never emits the former.
    assert missed == {bytes([byte]) for byte in range(128)} - _bytes_with_one_id()


def _bytes_with_one_id() -> set[bytes]:
    """ASCII that ``v3`` spells by one token only, a byte."""
    spelled = real("v3").table.all_bytes
    return {bytes([byte]) for byte in range(128) if spelled.count(bytes([byte])) == 1}


@pytest.mark.parametrize(
    ("student", "teacher", "least"),
    [("v3", "tekken", 0.85), ("python_50k", "tekken", 0.25), ("tekken", "v3", 0.15)],
)
def test_a_known_share_of_tokens_has_the_same_bytes(
    student: str, teacher: str, least: float
) -> None:
    spellings = [spelled for spelled in real(student).table.all_bytes if spelled]
    known = {*real(teacher).table.all_bytes}
    assert least < sum(spelled in known for spelled in spellings) / len(spellings) < least + 0.25
